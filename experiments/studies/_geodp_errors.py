"""Computes errors of released gradients in direction and value (GeoDP Fig. 3, 4)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dpoptax._random.keys import check_key
from dpoptax.contrib._coordinates import from_hyperspherical, to_hyperspherical


class GeoDPErrors(NamedTuple):
    """Mean square errors of a mean gradient ḡ released by GeoDP and by DP-SGD.

    Attributes:
      geodp_direction: E‖θ* - θ‖² with GeoDP's noise, in square radians.
      dp_direction: the same with DP-SGD's noise.
      geodp_gradient: E‖g* - ḡ‖² with GeoDP's noise, in the gradient's units squared.
      dp_gradient: the same with DP-SGD's noise.
    """

    geodp_direction: Any
    dp_direction: Any
    geodp_gradient: Any
    dp_gradient: Any


def random_mean_gradient(dimension: int, *, norm: float, key: Array) -> Array:
    """Returns a mean gradient of the given l2 norm in a uniformly random direction.

    The shape is (dimension,). In the paper, gradients come from a network. The results depend on
    ‖ḡ‖/C, which the paper does not state.
    """
    direction = jax.random.normal(check_key(key), (dimension,))
    return norm * direction / jnp.linalg.norm(direction)


def geodp_errors(
    gradient: Array,
    *,
    noise_multiplier: float,
    batch_size: int,
    beta: float,
    l2_clip_norm: float = 0.1,
    repeats: int = 16,
    key: Array,
) -> GeoDPErrors:
    """Estimates the errors of GeoDP Definition 3 for one mean gradient.

    GeoDP's noise is the published one, which is not private at this multiplier; see
    `dpoptax.contrib.geodp`. Angles are measured from the equator, which does not change
    differences.

    Args:
      gradient: ḡ, the mean of clipped gradients, (d,).
      noise_multiplier: σ.
      batch_size: B.
      beta: β.
      l2_clip_norm: C; 0.1 throughout the paper.
      repeats: number of draws of the noise.
      key: a JAX key.

    Returns:
      Four floats.
    """
    errors = _geodp_errors(
        gradient,
        noise_multiplier * l2_clip_norm / batch_size,
        noise_multiplier * _angle_range(gradient.size, beta) / batch_size,
        jax.random.split(check_key(key), repeats),
    )
    return GeoDPErrors(*(float(error) for error in errors))


@jax.jit
def _geodp_errors(gradient, stddev, angle_stddev, keys):
    norm, angles = to_hyperspherical(gradient)

    def one(key):
        for_geodp, for_dp = jax.random.normal(key, (2, gradient.size))
        noisy_angles = angles + angle_stddev * for_geodp[1:]
        geodp = from_hyperspherical(norm + stddev * for_geodp[0], noisy_angles)
        dp = gradient + stddev * for_dp
        dp_angles = to_hyperspherical(dp)[1]
        offset = (dp_angles[-1] - angles[-1] + jnp.pi) % (2 * jnp.pi) - jnp.pi
        return (
            jnp.sum((noisy_angles - angles) ** 2),
            jnp.sum((dp_angles[:-1] - angles[:-1]) ** 2) + offset**2,
            jnp.sum((geodp - gradient) ** 2),
            jnp.sum((dp - gradient) ** 2),
        )

    return jax.tree.map(jnp.mean, jax.lax.map(one, keys))


def _angle_range(dimension: int, beta: float) -> float:
    return math.sqrt(dimension + 2) * beta * math.pi


class Sweep(NamedTuple):
    """Errors along one axis of a figure's panel.

    Attributes:
      name: the varied setting: "noise_multiplier", "dimension", "batch_size" or "beta".
      values: its values, (n,).
      fixed: the other settings.
      errors: `GeoDPErrors` of arrays (n,).
    """

    name: str
    values: tuple[float, ...]
    fixed: dict[str, float]
    errors: GeoDPErrors


# The paper prints the last batch size as 163984.
_FIG_3: tuple[tuple[str, tuple[float, ...], dict[str, float]], ...] = (
    (
        "noise_multiplier",
        (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0),
        {"dimension": 5000, "batch_size": 2048},
    ),
    (
        "dimension",
        (500, 1000, 2000, 5000, 10000, 20000),
        {"noise_multiplier": 8.0, "batch_size": 4096},
    ),
    (
        "batch_size",
        (512, 1024, 2048, 4096, 8192, 16384),
        {"noise_multiplier": 8.0, "dimension": 10000},
    ),
)


def geodp_figure_3(
    *, relative_norm: float = 0.01, repeats: int = 8, key: Array
) -> dict[str, Sweep]:
    """Computes the nine panels of GeoDP Fig. 3: errors over σ, d and B for three β.

    Args:
      relative_norm: ‖ḡ‖/C of the mean gradient. The paper does not state it. At 0.01 we find the
        paper's order at β = 1 and small σ, and at 0.1 we do not.
      repeats: number of draws of the noise for each point.
      key: a JAX key.

    Returns:
      Sweeps by panel, "a" to "i". The values of β are 1, 0.1 and 0.01.
    """
    betas = (1.0, 0.1, 0.01)
    return {
        "abcdefghi"[3 * row + column]: geodp_sweep(
            name, values, fixed | {"beta": beta}, relative_norm, repeats, key
        )
        for row, (name, values, fixed) in enumerate(_FIG_3)
        for column, beta in enumerate(betas)
    }


def geodp_figure_4(
    *, relative_norm: float = 0.01, repeats: int = 8, key: Array
) -> dict[str, Sweep]:
    """Computes the panels of GeoDP Fig. 4: errors over β at σ = 8, B = 4096, three d.

    The arguments are those of `geodp_figure_3`. The panels are "a" to "c".
    """
    betas = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
    fixed = {"noise_multiplier": 8.0, "batch_size": 4096}
    return {
        panel: geodp_sweep(
            "beta", betas, fixed | {"dimension": dimension}, relative_norm, repeats, key
        )
        for panel, dimension in zip("abc", (20000, 10000, 5000), strict=True)
    }


def geodp_sweep(
    name: str,
    values: Sequence[float],
    fixed: Mapping[str, float],
    relative_norm: float,
    repeats: int,
    key: Array,
) -> Sweep:
    """Computes the errors while one setting varies; see `Sweep` for the settings."""
    l2_clip_norm, points = 0.1, []
    for value in values:
        settings = {**fixed, name: value}
        dimension = int(settings.pop("dimension"))
        for_gradient, for_noise = jax.random.split(check_key(key))
        gradient = random_mean_gradient(
            dimension, norm=relative_norm * l2_clip_norm, key=for_gradient
        )
        points.append(
            geodp_errors(
                gradient,
                noise_multiplier=settings["noise_multiplier"],
                batch_size=int(settings["batch_size"]),
                beta=settings["beta"],
                l2_clip_norm=l2_clip_norm,
                repeats=repeats,
                key=for_noise,
            )
        )
    columns = (np.array(column) for column in zip(*points, strict=True))
    return Sweep(name, tuple(values), dict(fixed), GeoDPErrors(*columns))
