"""Sums of clipped gradients as integers: how many fit."""

from dpoptax._clip.clip import Clip

# A sum and the noise on it, at most 17 standard deviations of 2²² steps, stay within int32.
LARGEST = 2**30


def check_capacity(clip: Clip, step: float, examples: int) -> None:
    """Raises where so many clipped gradients on a grid may leave the integers."""
    largest = examples * (clip.sensitivity / step + 1.0)
    if largest > LARGEST:
        raise ValueError(
            f"grid={step}: the sum of {examples} examples of sensitivity {clip.sensitivity} may be "
            f"{largest:.3g} of its steps, and int32 with room for noise holds {LARGEST:.3g}; take "
            "dpoptax.extend.fixed_point_grid with the batch size that a step really has, padding "
            "included"
        )
