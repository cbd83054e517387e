"""Configures DOPPLER on digits with a filter that is estimated during training."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def adaptive_fir(run: DigitsRun = DigitsRun(), length: int = 4, decay: float = 0.95) -> Task:
    """Returns the task.

    Args:
        run: Settings of the run.
        length: Number of coefficients, at least 2.
        decay: Decay of the running means that estimate the gradients' correlation, in [0, 1).
    """
    plan = run.plan()
    method = dpoptax.contrib.adaptive_fir(length, run.stddev(plan), decay=decay)
    return run.task(method, plan, name="Adaptive FIR")
