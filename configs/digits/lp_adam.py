"""Configures LP-Adam on digits: Adam with a low-pass filter as its momentum."""

from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def lp_adam(
    run: DigitsRun = DigitsRun(learning_rate=0.02),
    preset: str = "doppler-first-order-1",
    b2: float = 0.999,
) -> Task:
    """Returns the task, by default with the first-order filter of DOPPLER's Table 2.

    Args:
        run: Settings of the run.
        preset: Name of the filter; see dpoptax.filters.presets.
        b2: Decay of the second moment of the unfiltered gradient, in [0, 1).
    """
    method = dpoptax.extend.scale_by_lp_adam(*dpoptax.filters.preset(preset), b2=b2)
    return run.task(method, name="LP-Adam", is_optimizer=True)
