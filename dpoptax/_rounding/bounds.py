"""Bounds the contribution of one example to a clipped sum, including rounding.

A gradient G that is summed as Σ_t r_t ⊗ c_t has, in addition to its norm n, an absolute size

    S = Σ_t ‖r_t‖‖c_t‖ ≥ n.

Rounding errors are relative to S, not to n: if terms cancel, a computed n may consist of error
only. So n is replaced by an upper bound n⁺ ≥ n that includes the error of computing it, for any
order of the sums. An example is then scaled by

    f = factor((1 + τ) max(n⁺, S/M)),

a function of this example only. It follows that ‖f G‖ ≤ C/(1 + τ) for every geometry with t ·
factor(t) ≤ C, and that f S ≤ M C/(1 + τ). The latter bounds the rounding of the sum. One example
changes this rounding by at most τ C/(1 + τ) (`block_sums`), so it moves the sum by at most C in
total. A gradient with S below M C is not scaled by `l2_clip` because its terms cancel.
`docs/developers/bound.md` has the proof.

No branch reads the batch: the treatment of one example never depends on another.

Numbers are used as they are, in a working range: an example adds exactly zero if a number of its
factors or gradients is 2⁴⁰ or more, or if n⁺ or S/M is 2³⁹ or more. So no square that decides about
an example overflows. Small squares may be flushed to zero. Bounds of norms include them.

Rounding errors use the standard model: γ_k = k u/(1 − k u) for k operations with unit roundoff u
(Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 3).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._clips.clip import Clip, check_bound
from dpoptax._support.tree import PyTree, widen
from dpoptax._support.xla import check_settings, keeps_order, materialize, unstack

# M for up to 256 terms. Training does not reach it: docs/developers/bound.md has measurements.
_USUAL_RATIO = 2.0**5
# The unit roundoff of float32.
UNIT_ROUNDOFF = 2.0**-24
# The relative error of a coefficient times a factor, with room for the rounding of these bounds.
FLOAT32_ERROR = 2.0**-23
# XLA may set results below 2^-126 to zero. This is an upper bound of the loss of a square.
_LOST_SQUARE = 2.0**-125
# The number of roundings that a quotient or a root counts as. On GPU they err by up to two units in
# the last place.
ROOT_ROUNDINGS = 4
# Twice the roundings in a norm or S/M, in a geometry's factor, and in the coefficient: four roots
# and quotients and seven other operations.
COEFFICIENT_ROUNDINGS = 2 * (4 * ROOT_ROUNDINGS + 7)
# The working range: factors and gradients are below it.
LARGEST_NUMBER = 2.0**40
_LARGEST_NORM = 2.0**39
# Numbers that are set to zero change a sum by less than 2^-85 √d. Relative to a larger bound, this
# is negligible (`block_sums`).
MINIMUM_BOUND = 2.0**-40
# Squares are summed in blocks of this length. Each level costs two kernels.
_BLOCK = 2048
# Statistics are multiples of one number, up to 2⁸ times it: float32 holds such sums exactly.
_STATISTIC_EXAMPLES = 2**16


def gamma(operations: float) -> float:
    """Returns γ_k = k u/(1 − k u), a bound on the relative error of k operations."""
    if operations * UNIT_ROUNDOFF >= 0.5:
        raise ValueError(
            f"A sum must have fewer than {0.5 / UNIT_ROUNDOFF:.3g} terms to bound its rounding, "
            f"got {operations:g}. Use smaller micro-batches, shorter sequences or method='vmap'."
        )
    return operations * UNIT_ROUNDOFF / (1.0 - operations * UNIT_ROUNDOFF)


def largest_ratio(terms: int) -> float:
    """Returns M for a sum of `terms` terms: at least twice √terms, S/n of uncorrelated terms.

    For one term, S is n and M is 1. For more than 4,096 terms M is smaller again, so that rounding
    changes the sum by at most C/16, or M is 32.
    """
    root = math.sqrt(terms)
    longest = min(2.0 * root, 2.0**19 / max(1, terms))
    # S/n of few terms rarely exceeds 8 √terms, and a smaller M allows longer blocks.
    return 1.0 if terms <= 1 else min(8.0 * root, max(_USUAL_RATIO, longest))


def check_rounding(tau: float) -> None:
    """Raises an error if rounding uses more than half of the clipping bound."""
    if tau > 0.5:
        raise ValueError(
            "One example must change the rounding of the sum by at most half the clipping bound, "
            f"got {tau:.2g} times the bound. Use smaller batches, or sum integers with "
            "`dpoptax.extend.fixed_point_grid`."
        )


class NormBounds(NamedTuple):
    """Holds the sizes of gradients, (B,) each.

    Attributes:
      square: upper bounds of ‖G‖².
      absolute: upper bounds of S.
    """

    square: jax.Array
    absolute: jax.Array


class Piece(NamedTuple):
    """Describes one piece of each example's gradient.

    A piece is the gradient of one `Product`, or one bundle of formed gradients. Pieces share no
    coordinate.

    Attributes:
      size: the bounds of the piece G.
      group: the clip's group of the piece.
      ratio: M: the terms of the clipped piece are at most M times the clip's bound. For several
        pieces with coefficients c, √(Σ_p (c S_p/M_p)²) is at most the bound.
      sum_error: the rounding of one weighted summand before it is added: |computed − c G| is at
        most `sum_error` · c S.
    """

    size: NormBounds
    group: int = 0
    ratio: float = 1.0
    sum_error: float = 0.0

    @property
    def shares(self) -> tuple[float, float]:
        """Returns the shares of S that the norm and S/M of the weighted piece include."""
        return self.sum_error, (1.0 + self.sum_error) / self.ratio


def within_range(x: jax.Array) -> jax.Array:
    """Replaces numbers outside of the working range, and NaN, by 2⁴⁰.

    An example with such a number adds zero, because its norm is outside of the range. The number is
    finite, so its product with a coefficient of zero is zero. float16 becomes float32.
    """
    with jax.named_scope("within_range"):  # tests/clipped_grad/hlo_test.py looks for this name
        x = x if x.dtype == jnp.bfloat16 else widen(x)
        return lax.select(jnp.abs(x) < LARGEST_NUMBER, x, lax.full_like(x, LARGEST_NUMBER))


def broadcast_examples(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns values (B,) in a shape that broadcasts to x, (B, …)."""
    return values.reshape((-1,) + (1,) * (x.ndim - 1))


def formed_bounds(x: jax.Array) -> NormBounds:
    """Returns the norm bounds of formed gradients, (B, …).

    The sum adds the numbers that are measured here, so S is the norm itself.
    """
    square = upper_square(widen(x))
    return NormBounds(square, jnp.sqrt(square))


def upper_square(x: jax.Array) -> jax.Array:
    """Returns an upper bound of ‖x‖² of each example.

    The result is (B,), float32. Sums are taken in blocks of blocks, with barriers that keep the
    compiler from joining them. The error then grows with the length and depth of blocks, not with
    the number of entries.
    """
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    values, operations = jnp.square(flat).astype(jnp.float32), 3
    # `operations` counts the longest chain of roundings: the square, a block on each level, 1 + γ
    # itself as a float, and the product with it.
    size = flat.shape[1]
    while values.shape[1] > _BLOCK:
        padded = jnp.pad(values, ((0, 0), (0, -values.shape[1] % _BLOCK)))
        values = lax.optimization_barrier(padded.reshape(x.shape[0], -1, _BLOCK).sum(axis=-1))
        operations += _BLOCK
    operations += values.shape[1]
    # Rounding may have made the sum smaller by γ, and underflow by a constant for each entry.
    return values.sum(axis=1) * (1.0 + gamma(operations)) + lost_squares(size)


def lost_squares(count: int) -> np.float32:
    """Returns how much a sum of so many squares may lose because they are set to zero."""
    return np.float32(count * _LOST_SQUARE)


def clip_coefficients(
    clip: Clip, pieces: list[Piece], mask: jax.Array, *, groups: list[int], tau: float
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Returns the coefficient of each piece of each gradient. All clipping happens here.

    Args:
      clip: the geometry. Its factors satisfy t · factor(t) ≤ the bound of the group.
      pieces: the pieces of each gradient.
      mask: the examples that count, (B,) bool.
      groups: the clip's group of each parameter. A group may have no piece.
      tau: τ, how much an example changes the rounding of the sum, relative to its bound.

    Returns:
      c (B,) of each piece, such that c G is the clipped piece; upper bounds of the norms (B,) of
      the first group; and whether each example is used, (B,): it is within the working range and
      not masked.
    """
    check_settings()
    check_rounding(tau)
    check_bound("The clipping bound", clip.sensitivity, MINIMUM_BOUND)
    own = np.array([piece.group for piece in pieces])
    inside = (np.arange(1 + max(groups))[:, None] == own)[:, :, None]  # (groups, pieces, 1)
    # All terms are positive, so rounding is relative to the sum itself.
    room = 1.0 + gamma(len(pieces) + COEFFICIENT_ROUNDINGS)

    def length(values: jax.Array) -> jax.Array:
        square = jnp.sum(jnp.where(inside, jnp.square(values), 0.0), axis=1)
        return jnp.sqrt(room * (square + lost_squares(len(pieces))))

    square, sizes = map(jnp.stack, zip(*(piece.size for piece in pieces), strict=True))
    errors, shares = np.array([piece.shares for piece in pieces], np.float32).T[:, :, None]
    norms, absolute = length(jnp.sqrt(square) + errors * sizes), length(shares * sizes)
    # Both are compared, since a maximum may lose NaN. If the compiler reorders sums, the bound does
    # not hold, and no example is used.
    used = mask & jnp.all(is_in_range(norms, absolute), axis=0)
    used &= keeps_order(lax.bitcast_convert_type(norms[0], jnp.int32))
    # Bounds ‖f G‖ and f S/M, and leaves room for the rounding of the sum: `absolute` is S/M.
    longest = jnp.maximum(norms, absolute) * (1.0 + tau)
    coefficients = clip.factors(longest.T).T  # (groups, B)
    # Geometries that divide by the norm may have no finite coefficient for a tiny gradient.
    coefficients = jnp.where(used[None] & jnp.isfinite(coefficients), coefficients, 0.0)
    # Stored, so that parts that nearly cancel get exactly the same coefficient.
    (by_group,) = unstack(materialize(coefficients))
    return [by_group[group] for group in own], norms[0], used


def sum_statistic(
    clip: Clip, reference: PyTree, norms: jax.Array, used: jax.Array, examples: int
) -> jax.Array | None:
    """Returns the sum of the geometry's statistic over used examples of a batch, if it has one."""
    value = clip.statistic(norms, reference)
    if value is None:
        return None
    if examples > _STATISTIC_EXAMPLES:
        raise ValueError(
            f"A batch must have at most {_STATISTIC_EXAMPLES} examples for {clip} to count them "
            f"exactly, got {examples}. Use smaller batches, or method='vmap', which includes "
            "the rounding of the count in its bound."
        )
    return jnp.sum(jnp.where(used, value, 0.0))


def is_in_range(norms: jax.Array, absolute: jax.Array) -> jax.Array:
    """Returns whether n⁺ and S/M are numbers in the working range."""
    return (norms < _LARGEST_NORM) & (absolute < _LARGEST_NORM)
