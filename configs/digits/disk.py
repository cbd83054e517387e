"""Configures DiSK on digits: look-ahead gradients, followed by a Kalman filter."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def disk(run: DigitsRun = DigitsRun(), kappa: float = 0.7, gamma: float | None = None) -> Task:
    """Returns the task, which needs one gradient per example by default: one weight is zero.

    Args:
        run: Settings of the run.
        kappa: Gain of predictor and filter, in (0, 1]. 1 is DP-SGD.
        gamma: Length of the look-ahead, in units of the last step. None: (1 - kappa) / kappa.
    """
    return run.task(dpoptax.disk(kappa, gamma), name="DiSK")
