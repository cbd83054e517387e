"""Checks that sums of clipped gradients on a grid fit into integers."""

from dpoptax._clip.clip import Clip

# The sum and its noise, at most 17 standard deviations of 2²² steps, stay within int32.
LARGEST_GRID_SUM = 2**30


def check_capacity(clip: Clip, step: float, examples: int) -> None:
    """Raises an error if the sum of these clipped gradients may overflow int32."""
    largest = examples * (clip.sensitivity / step + 1.0)
    if largest > LARGEST_GRID_SUM:
        raise ValueError(
            f"The sum must be at most {LARGEST_GRID_SUM:.3g} grid steps, to fit into int32 with "
            f"its noise, got {largest:.3g} for grid={step}, {examples} examples and "
            f"sensitivity {clip.sensitivity}. Call `dpoptax.extend.fixed_point_grid` with the size "
            "of the padded batch."
        )
