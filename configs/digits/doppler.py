"""Configures DOPPLER on digits: DP-SGD followed by a low-pass filter."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def doppler(run: DigitsRun = DigitsRun(), preset: str = "doppler-first-order-1") -> Task:
    """Returns the task, by default with the first-order filter of the paper's Table 2.

    Args:
        run: Settings of the run.
        preset: Name of the filter; see dpoptax.filters.presets.
    """
    return run.task(dpoptax.doppler(*dpoptax.filters.preset(preset)), name="DOPPLER")
