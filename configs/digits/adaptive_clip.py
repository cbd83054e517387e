"""Configures a clipping bound on digits that follows the median gradient norm."""

import optax
from digits_parts.run import DigitsRun

import dpoptax
from dpoptax.training import Task


def adaptive_clip(
    run: DigitsRun = DigitsRun(learning_rate=0.75),
    quantile: float = 0.5,
    clip_rate: float = 0.2,
    count_share: float = 0.01,
) -> Task:
    """Returns the task, whose bound starts at `l2_clip_norm` (Andrew et al., 2021).

    Args:
        run: Settings of the run.
        quantile: Target fraction of examples with unclipped gradients, in [0, 1].
        clip_rate: A step changes the bound by a factor of at most about exp(clip_rate).
        count_share: Fraction of the privacy cost spent on the count, in (0, 1).
    """
    clip = dpoptax.contrib.adaptive_clip(
        run.l2_clip_norm, quantile=quantile, learning_rate=clip_rate, count_share=count_share
    )
    return run.task(optax.identity(), name="Adaptive clip", clip=clip)
