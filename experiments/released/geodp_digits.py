"""Trains logistic regressions with the released GeoDP and its baseline, in NumPy."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from experiments.data.published_data import PublishedSpec
from experiments.released.linear_model import load
from experiments.released.rules import Array

_CLIP, _RATE, _STEPS = 0.1, 0.1, (50, 350)
CURVES = (
    *((1.0, 2048, 1.0), (1.0, 4096, 1.0)),
    *((10.0, 2048, 1.0), (10.0, 2048, 0.5), (10.0, 2048, 0.1)),
    *((0.01, 256, 1.0), (0.1, 256, 1.0)),
)
"""σ, B in the noise, and β. Every step takes all examples."""
Update = Callable[[Array, Array], Array]


def rows(data_dir: Path) -> list[tuple[str, ...]]:
    """Returns σ, B, β and the training losses after 50 and 350 steps of four updates.

    The updates are both branches as released, the baseline without clipping, and GeoDP with the
    baseline's clipping, all with the same noise.
    """
    data = load(PublishedSpec("mnist", data_dir))
    kept = data.labels < 2
    updates: list[Update] = []
    for _, size, beta in CURVES:
        dp = functools.partial(_dp, size=size)
        geodp = functools.partial(_geodp, size=size, beta=beta)
        bounded = functools.partial(_geodp, size=size, beta=beta, clipped=True)
        updates += [functools.partial(_dp, size=size, clipped=True), geodp, dp, bounded]
    sigmas = np.repeat([sigma for sigma, _, _ in CURVES], len(updates) // len(CURVES))
    losses = iter(train(data.inputs[kept], data.labels[kept], updates, sigmas).T)
    return [
        (
            *(f"{sigma:g}", str(size), f"{beta:g}"),
            *(" / ".join(f"{loss:.4f}" for loss in next(losses)) for _ in range(4)),
        )
        for sigma, size, beta in CURVES
    ]


def _dp(mean: Array, noise: Array, *, size: int, clipped: bool = False) -> Array:
    return dp_branch(mean, _CLIP, size, noise) if clipped else mean + _CLIP / size * noise


def _geodp(mean: Array, noise: Array, *, size: int, beta: float, clipped: bool = False) -> Array:
    mean = clip_mean(mean, _CLIP) if clipped else mean
    return geodp_branch(mean, _CLIP, size, noise, beta=beta)


def train(inputs: Array, labels: Array, updates: Sequence[Update], sigmas: Array) -> Array:
    """Returns losses (2, updates) after 50 and 350 steps from zero with all examples.

    Each update gets a mean gradient and noise of its σ.
    """
    rng = np.random.default_rng(0)
    x = np.zeros((len(updates), inputs.shape[1]), np.float32)
    losses, targets = [], labels[:, None].astype(np.float32)
    for t in range(max(_STEPS) + 1):
        logits = inputs @ x.T
        if t in _STEPS:
            losses.append(np.mean(np.logaddexp(0, logits) - targets * logits, axis=0))
        means = (1 / (1 + np.exp(-logits)) - targets).T @ inputs / len(targets)
        noise = sigmas[:, None] * rng.normal(size=x.shape)
        for i, update in enumerate(updates):
            x[i] -= _RATE * update(means[i].astype(np.float64), noise[i])
    return np.stack(losses)


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
