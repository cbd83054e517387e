"""NumPy transcriptions of one step of the released GeoDP and of its baseline."""

import math

import numpy as np

from experiments.released.rules import Array


def clip_mean(mean: Array, clip_norm: float) -> Array:
    """Scales the mean gradient of a batch down to `clip_norm`."""
    return mean / max(1.0, float(np.linalg.norm(mean)) / clip_norm)


def dp_branch(mean: Array, clip_norm: float, batch_size: int, noise: Array) -> Array:
    """Returns the baseline's step: the mean is clipped, not the examples.

    `noise` has standard deviation σ.
    """
    return clip_mean(mean, clip_norm) + clip_norm / batch_size * noise


def geodp_branch(
    mean: Array, clip_norm: float, batch_size: int, noise: Array, *, beta: float
) -> Array:
    """Returns the step of GeoDP's Runme.m: noise on length and angles of the mean, not clipped."""
    tails = np.sqrt(np.cumsum(mean[::-1] ** 2))[::-1]
    angles = np.append(np.arctan2(tails[1:-1], mean[:-2]), math.atan2(mean[-1], mean[-2]))
    scale = math.sqrt(len(mean) + 2) * beta * math.pi / batch_size
    angles = angles + scale * noise[1:]
    length = tails[0] + clip_norm / batch_size * noise[0]
    sines = np.append(1.0, np.cumprod(np.sin(angles)))
    return length * sines * np.append(np.cos(angles), 1.0)
