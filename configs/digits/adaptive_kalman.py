"""Configures a Kalman filter on digits that estimates its gain."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def adaptive_kalman(run: DigitsRun = DigitsRun(), decay: float = 0.95) -> Task:
    """Returns the task.

    Args:
        run: Settings of the run.
        decay: Decay of the running mean that estimates the drift of the gradient, in [0, 1).
    """
    plan = run.plan()
    method = dpoptax.adaptive_kalman(run.stddev(plan), decay=decay)
    return run.task(method, plan, name="Adaptive Kalman")
