"""Limits parts of a gradient that are computed again after their norms are known.

A clip needs the norm of the whole gradient. If nothing is kept between the norms and the sum, the
gradient is computed twice: first to measure its parts, then to sum them. The first turn gives each
part a limit for its length. The second turn measures the part again, from the factors that it sums.
So the bound of the sum does not rely on the two turns being equal, which no compiler promises.
`docs/developers/bound.md` has the proof.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._rounding.bounds import (
    COEFFICIENT_ROUNDINGS,
    NormBounds,
    Piece,
    gamma,
    is_in_range,
    lost_squares,
)
from dpoptax._support.xla import materialize


class PartLimits(NamedTuple):
    """Limits how much one part of each gradient may add to a sum, (B,) each.

    Attributes:
      factor: c, the coefficient of G.
      length: an upper bound of ‖G‖ and of S/M.
    """

    factor: jax.Array
    length: jax.Array


def part_length(piece: Piece) -> jax.Array:
    """Returns max(n⁺, S/M) of one piece, (B,), with the error of its weighted summand.

    It is infinite outside of the working range.
    """
    square, absolute = piece.size
    error, share = np.array(piece.shares, np.float32)
    norm, absolute = jnp.sqrt(square) + absolute * error, absolute * share
    room = 1.0 + gamma(COEFFICIENT_ROUNDINGS)
    return jnp.where(is_in_range(norm, absolute), room * jnp.maximum(norm, absolute), jnp.inf)


def limited_coefficients(limits: PartLimits, length: jax.Array) -> jax.Array:
    """Returns w, (B,), such that ‖w G‖ ≤ c · limit and w S ≤ M c · limit.

    If G is unchanged since its limits were measured, w is c. If it differs, for example because the
    compiler chose another order of sums, the part is shortened. So the limits hold for any
    compiler.
    """
    # A part of zero has a length above zero, which includes numbers that are set to zero.
    found = limits.factor * jnp.minimum(1.0, limits.length / length)
    # Stored for the same reason as in `clip_coefficients`.
    return materialize(jnp.where(jnp.isfinite(found), found, 0.0))


def join_lengths(parts: list[jax.Array]) -> NormBounds:
    """Returns the size of a gradient from the lengths of its parts, (B, steps) each.

    Steps share no coordinate, so the squares of their lengths add up. Parts share coordinates, so
    their lengths add up.
    """
    total = jnp.zeros(parts[0].shape[0], jnp.float32)
    for lengths in parts:
        steps = lengths.shape[1]
        room = 1.0 + gamma(steps + len(parts) + COEFFICIENT_ROUNDINGS)
        total += room * jnp.sqrt(jnp.sum(jnp.square(lengths), axis=1) + lost_squares(steps))
    return NormBounds(jnp.square(total) + lost_squares(1), total)


def make_limits(length: jax.Array, coefficient: jax.Array) -> PartLimits:
    """Returns a part's limits, (B, steps), from its lengths and the coefficients, (B,)."""
    factor = jnp.broadcast_to(coefficient[:, None], length.shape)
    return PartLimits(factor, jnp.where(jnp.isfinite(length), length, 0.0))
