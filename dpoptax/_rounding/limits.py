"""Limits parts of a gradient that are computed again after their norms are known.

A clip needs the norm of the whole gradient. If nothing is kept between the norms and the sum, the
gradient is computed twice: first to measure its parts, then to sum them. The first turn gives each
part a limit for its length. The second turn measures the part again, from the factors that it sums.
So the bound of the sum does not rely on the two turns being equal, which no compiler promises.
`docs/developers/bound.md` has the proof.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._rounding.bounds import (
    COEFFICIENT_ROUNDINGS,
    ZERO_EXPONENT,
    NormBounds,
    Piece,
    Scales,
    gamma,
    power_of_two,
    underflow_loss,
)
from dpoptax._support.xla import materialize


class Limits(NamedTuple):
    """Limits how much one part of each gradient may add to a sum, (B,) each.

    Attributes:
      factor: c, the coefficient of G/2^exponent.
      length: an upper bound of ‖G/2^exponent‖ and of S/M.
      exponent: int32.
    """

    factor: jax.Array
    length: jax.Array
    exponent: jax.Array


class PartNorms(NamedTuple):
    """Holds upper bounds of the norm and of S/M of parts of gradients, divided by 2^exponent.

    Both arrays are (B, …). The norm of a part that is not finite is infinite.
    """

    norms: jax.Array
    exponents: jax.Array

    @classmethod
    def unpack(cls, packed: jax.Array) -> "PartNorms":
        """Returns the norms in an array (B, …, 2) in float32. Zeros mean zero gradients."""
        return cls(packed[..., 0], packed[..., 1].astype(jnp.int32) + ZERO_EXPONENT)

    def pack(self) -> jax.Array:
        exponents = (self.exponents - ZERO_EXPONENT).astype(jnp.float32)  # exact: below 2²⁴
        return jnp.stack([self.norms, exponents], axis=-1)


def part_norms(scales: Scales, piece: Piece) -> PartNorms:
    """Returns max(n⁺, S/M) of one piece, (B,), with the error of its weighted summand."""
    square, absolute = piece.size
    error, share = np.array(piece.shares, np.float32)
    longest = jnp.maximum(jnp.sqrt(square) + absolute * error, absolute * share)
    finite = jnp.all(scales.finite, axis=(0, 1))
    room = 1.0 + gamma(COEFFICIENT_ROUNDINGS)
    return PartNorms(jnp.where(finite, room * longest, jnp.inf), scales.exponent[0])


def limited_coefficients(limits: Limits, part: PartNorms) -> jax.Array:
    """Returns w, (B,), such that ‖w G'‖ ≤ c · length and w S ≤ M c · length.

    If G is unchanged since its limits were measured, w G' is c G/2^exponent. If it differs, for
    example because the compiler chose another order of sums, the part is shortened. So the limits
    hold for any compiler.
    """
    shift = power_of_two(part.exponents - limits.exponent)
    share = limits.length / jnp.where(part.norms > 0, part.norms, 1.0)
    found = limits.factor * jnp.minimum(shift, share)
    # Stored for the same reason as in `clip_coefficients`.
    return materialize(jnp.where(jnp.isfinite(found), found, 0.0))


def join_norms(parts: list[PartNorms]) -> tuple[NormBounds, Scales]:
    """Returns the size and the scale of a gradient from its parts, (B, steps) each.

    Steps share no coordinate, so the squares of their norms add up. Parts share coordinates, so
    their norms add up.
    """
    tops = [jnp.max(part.exponents, axis=1) for part in parts]
    exponent = functools.reduce(jnp.maximum, tops)
    total = jnp.zeros(exponent.shape, jnp.float32)
    finite = jnp.ones(exponent.shape, bool)
    for norms, exponents in parts:
        finite &= jnp.all(jnp.isfinite(norms), axis=1)
        lengths = jnp.where(jnp.isfinite(norms), norms, 0.0) * relative_power(exponents, exponent)
        steps = norms.shape[1]
        room = 1.0 + gamma(steps + len(parts) + COEFFICIENT_ROUNDINGS)
        total += room * jnp.sqrt(jnp.sum(jnp.square(lengths), axis=1) + underflow_loss(steps))
    return NormBounds(jnp.square(total), total), Scales(exponent[None], finite[None, None])


def make_limits(part: PartNorms, coefficient: jax.Array, exponent: jax.Array) -> Limits:
    """Returns a part's limits, (B, steps), from c and exponent of its gradient, (B,)."""
    length = part.norms * relative_power(part.exponents, exponent)
    factor, scale = (jnp.broadcast_to(x[:, None], length.shape) for x in (coefficient, exponent))
    return Limits(factor, jnp.where(jnp.isfinite(length), length, 0.0), scale)


def relative_power(exponents: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns 2^(exponents − exponent) of (B, steps) and (B,), at most 1."""
    return power_of_two(jnp.clip(exponents - exponent[:, None], -127, 0))
