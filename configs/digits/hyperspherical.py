"""Configures the proven counterpart of GeoDP on digits."""

import optax
from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def hyperspherical(
    run: DigitsRun = DigitsRun(), angle_norm: float = 2.0, magnitude_weight: float = 0.1
) -> Task:
    """Returns the task, which clips in hyperspherical coordinates with shared noise.

    Args:
        run: Settings of the run.
        angle_norm: Bound on the l2 norm of one example's angles from the equator, in radians.
        magnitude_weight: Share of the magnitude in the bounded vector, in (0, 1).
    """
    clip = dpoptax.contrib.hyperspherical_clip(
        run.l2_clip_norm, angle_norm=angle_norm, magnitude_weight=magnitude_weight
    )
    return run.task(optax.identity(), name="Hyperspherical", clip=clip)
