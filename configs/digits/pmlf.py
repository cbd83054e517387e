"""Configures DP-PMLF on digits: per-example momentum, then a low-pass filter."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def pmlf(
    run: DigitsRun = DigitsRun(), length: int = 2, beta: float = 0.1, preset: str = "pmlf-mnist"
) -> Task:
    """Returns the task, by default with the filter of the paper's experiments on MNIST.

    Args:
        run: Settings of the run.
        length: Number of iterates at which each example's gradient is taken.
        beta: Weight of each iterate relative to the next newer one, in [0, 1].
        preset: Name of the filter; see dpoptax.filters.presets.
    """
    return run.task(dpoptax.pmlf(length, beta, *dpoptax.filters.preset(preset)), name="DP-PMLF")
