"""Configures inner-outer momentum on digits: DP-PMLF without normalization."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def inner_outer(
    run: DigitsRun = DigitsRun(learning_rate=0.15),
    length: int = 2,
    beta: float = 0.1,
    momentum: float = 0.9,
) -> Task:
    """Returns the task (Xiao et al., 2023).

    Args:
        run: Settings of the run.
        length: Number of iterates at which each example's gradient is taken.
        beta: Inner momentum, in [0, 1].
        momentum: Outer momentum, in [0, 1).
    """
    return run.task(dpoptax.contrib.inner_outer(length, beta, momentum), name="Inner-outer")
