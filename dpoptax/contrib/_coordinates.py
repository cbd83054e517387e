"""Hyperspherical coordinates of a vector, exact and parallel."""

import jax.numpy as jnp
from jax import Array, lax

from dpoptax._support.tree import float32_at_least, widen


def to_hyperspherical(v: Array) -> tuple[Array, Array]:
    """Converts rectangular to hyperspherical coordinates.

    GeoDP (Duan et al. 2025), eq. (24)–(26), with the first d - 2 angles measured from the equator,
    ψ_z = π/2 - θ_z:

        ‖v‖ = √(Σ_z v_z²),
        ψ_z = arctan2(v_z, √(Σ_{i>z} v_i²))   for z ≤ d - 2, in [-π/2, π/2],
        ψ_{d-1} = θ_{d-1} = arctan2(v_d, v_{d-1})   in [-π, π].

    In high dimension all θ_z are close to π/2, where float32 resolves only 1e-7. At d = 10⁶ this is
    an error of 2e-5 in the direction. ψ_z is close to 0 and keeps its relative accuracy.

    The tail norms are a reverse cumulative sum of squares, without a sequential loop. Squaring v /
    max|v| cannot overflow, and values that underflow are below rounding.

    Args:
      v: shape (..., d), d ≥ 1. In one dimension the norm carries the sign.

    Returns:
      The norm, shape (...), and the angles, shape (..., d - 1), in float32 or wider. The zero
      vector has norm 0 and angles 0.
    """
    v = widen(v)
    if v.shape[-1] == 0:
        raise ValueError(f"The last axis of `v` must not be empty, got shape {v.shape}.")
    if v.shape[-1] == 1:
        return v[..., 0], v[..., :0]
    largest = jnp.max(jnp.abs(v), axis=-1, keepdims=True)
    scaled = v / jnp.where(largest > 0, largest, 1)
    sums = lax.cumsum(scaled**2, axis=v.ndim - 1, reverse=True)
    norm = largest[..., 0] * jnp.sqrt(sums[..., 0])
    elevations = jnp.arctan2(scaled[..., :-2], jnp.sqrt(sums[..., 1:-1]))
    azimuth = jnp.arctan2(scaled[..., -1:], scaled[..., -2:-1])
    return norm, jnp.concatenate([elevations, azimuth], axis=-1)


def from_hyperspherical(norm: Array, angles: Array) -> Array:
    """Converts hyperspherical to rectangular coordinates.

    GeoDP eq. (27), with angles from the equator, the inverse of `to_hyperspherical`:

        v_z = ‖v‖ sin ψ_z Π_{i<z} cos ψ_i   for z ≤ d - 2,
        (v_{d-1}, v_d) = ‖v‖ Π_{i≤d-2} cos ψ_i · (cos ψ_{d-1}, sin ψ_{d-1}).

    It accepts any real angles and norm, because noise can move them out of their ranges.

    The products are a cumulative sum of logarithms, with separate signs. A running product of a
    million cosines, each rounded to 1 - k·6e-8, would accumulate the rounding errors.

    Args:
      norm: shape (...).
      angles: shape (..., d - 1).

    Returns:
      The vector, shape (..., d), in float32 or wider.
    """
    dtype = float32_at_least(norm, angles)
    norm, angles = norm.astype(dtype), angles.astype(dtype)
    if angles.shape[-1] == 0:
        return norm[..., None]
    elevations, azimuth = angles[..., :-1], angles[..., -1:]
    sin, cos = jnp.sin(elevations), jnp.cos(elevations)
    # For a zero tail the angle is π/2, rounded. Its cosine is 4e-8 in float32 instead of 0.
    cos = jnp.where(jnp.abs(cos) < jnp.finfo(dtype).eps / 2, 0.0, cos)
    # log|cos| is accurate through the sine for small angles, and directly for large ones.
    small = jnp.abs(sin) < 0.5
    logarithm = jnp.where(
        small, 0.5 * jnp.log1p(-(jnp.where(small, sin, 0.0) ** 2)), jnp.log(jnp.abs(cos))
    )
    axis = angles.ndim - 1
    odd = lax.cumsum((cos < 0).astype(jnp.int32), axis=axis) % 2
    products = jnp.exp(lax.cumsum(logarithm, axis=axis)) * (1 - 2 * odd).astype(dtype)
    ones = jnp.ones_like(azimuth)
    products = jnp.concatenate([ones, products], axis=-1)
    last = products[..., -1:]
    return norm[..., None] * jnp.concatenate(
        [products[..., :-1] * sin, last * jnp.cos(azimuth), last * jnp.sin(azimuth)], axis=-1
    )
