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

Exponents are kept separately from numbers. All numbers of one example are divided by a power of
two, so that the largest is about 1 and squares neither overflow nor underflow. The division adds
integers to exponent bits (`divide_by_power`). It is exact, no compiler can move it through a
product, and its result is finite for every input. Examples that are not finite, or leave the range
of float32, contribute exactly zero.

Rounding errors use the standard model: γ_k = k u/(1 − k u) for k operations with unit roundoff u
(Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 3).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._clips.clip import Clip
from dpoptax._support.tree import widen
from dpoptax._support.xla import (
    check_settings,
    keeps_order,
    materialize,
    round_to_dtype,
    store_integers,
)

# M for up to 256 terms. Training does not reach it: docs/developers/bound.md has measurements.
_LARGEST_RATIO = 2.0**5
# The unit roundoff of float32.
UNIT_ROUNDOFF = 2.0**-24
# If the largest entry is about 1, the squares of entries below the square root of the smallest
# normal number underflow. This bounds the loss of a norm for each entry, with room for sums.
_UNDERFLOW_LOSS = 2.0**-58
# The number of roundings that a quotient or a root counts as. On GPU they err by up to two units in
# the last place.
ROOT_ROUNDINGS = 4
# Twice the roundings in a norm or S/M, in a geometry's factor, and in the coefficient: four roots
# and quotients and seven other operations.
COEFFICIENT_ROUNDINGS = 2 * (4 * ROOT_ROUNDINGS + 7)
# Exponents of gradients are clamped to this range. Those outside of it stay far below or far above
# any clipping bound.
_EXPONENT_RANGE = (-126, 60)
# XLA may flush sums below 2^-126 to zero. Relative to a bound above this minimum, that is
# negligible. The steps of a grid are larger, since int32 holds at most 2³⁰ of them.
_MINIMUM_BOUND = 2.0**-80
# The exponent of a gradient that is exactly zero.
ZERO_EXPONENT = -(2**20)
# Division by 2 to this power makes every number zero (`divide_by_power`).
ERASE_EXPONENT = 2**20
_BLOCK = 128


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
    return 1.0 if terms <= 1 else min(8.0 * root, max(_LARGEST_RATIO, longest))


def check_rounding(tau: float) -> None:
    """Raises an error if rounding uses more than half of the clipping bound."""
    if tau > 0.5:
        raise ValueError(
            "One example must change the rounding of the sum by at most half the clipping bound, "
            f"got {tau:.2g} times the bound. Use smaller batches, or sum integers with "
            "`dpoptax.extend.fixed_point_grid`."
        )


class NormBounds(NamedTuple):
    """Holds the sizes of gradients, (B,) each, after division by powers of two.

    Attributes:
      square: upper bounds of ‖G‖².
      absolute: upper bounds of S.
    """

    square: jax.Array
    absolute: jax.Array


class Piece(NamedTuple):
    """Describes one piece of each example's gradient, divided by its power of two.

    A piece is the gradient of one `Product`, or one bundle of formed gradients. Pieces share no
    coordinate.

    Attributes:
      size: the bounds of the divided piece G'.
      group: the clip's group of the piece.
      ratio: M: the terms of the clipped piece are at most M times the clip's bound. For several
        pieces with coefficients c, √(Σ_p (c S_p/M_p)²) is at most the bound.
      sum_error: the rounding of one weighted summand before it is added: |computed − c G'| is at
        most `sum_error` · c S, with S of G'.
    """

    size: NormBounds
    group: int = 0
    ratio: float = 1.0
    sum_error: float = 0.0

    @property
    def shares(self) -> tuple[float, float]:
        """Returns the shares of S that the norm and S/M of the weighted piece include."""
        return self.sum_error, (1.0 + self.sum_error) / self.ratio


class Scales(NamedTuple):
    """Holds the divisors of gradients: a power of two for each side and example.

    Attributes:
      exponent: the sums of the exponents of all sides, (pieces, B), int32; `ZERO_EXPONENT` or below
        if the piece is exactly zero.
      finite: whether a side is finite, (pieces, sides, B).
    """

    exponent: jax.Array
    finite: jax.Array


def make_scales(tops: list[jax.Array]) -> tuple[jax.Array, Scales]:
    """Returns the divisors of all sides, and the scales, from the largest entries.

    `tops` holds the largest entries of each piece, (sides, B). The divisors are exponents of 2,
    (pieces, sides, B): 0 for a side that is zero or subnormal, and `ERASE_EXPONENT` for one that is
    not finite.

    Hundreds of kernels read the exponents. They compile in half the time if these are stored.
    """
    together = jnp.stack(tops)
    found = jnp.where(jnp.isfinite(together), binary_exponent(together), ERASE_EXPONENT)
    found = store_integers(found)
    finite = found != ERASE_EXPONENT
    total = jnp.sum(jnp.where(finite, found, ZERO_EXPONENT), axis=1, dtype=jnp.int32)
    return jnp.where(found == ZERO_EXPONENT, 0, found), Scales(total, finite)


@jax.jit  # traced once for each shape
def largest_entry(x: jax.Array) -> jax.Array:
    """Returns max |x| of each example, (B,) float32; inf if an entry is not finite."""
    # `max` alone is not enough: for some shapes, XLA's maximum on CPU drops NaN.
    # https://github.com/openxla/xla/issues/21461
    magnitude = jnp.abs(x)
    largest = jnp.where(magnitude <= jnp.finfo(x.dtype).max, magnitude, jnp.inf)
    return jnp.max(largest, axis=tuple(range(1, x.ndim)), initial=0.0).astype(jnp.float32)


def binary_exponent(top: jax.Array) -> jax.Array:
    """Returns ⌊log₂ top⌋ of normal numbers, int32; `ZERO_EXPONENT` for smaller ones."""
    # The sign bit of a magnitude is zero, so the shift leaves the biased exponent.
    bits = lax.bitcast_convert_type(top, jnp.int32)
    found = (bits >> 23) - 127
    return jnp.where(found >= -126, found, ZERO_EXPONENT)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent in float32; 0 below the normal range, and 2^127 above it."""
    # The biased exponent 0 is the number 0; 254, the largest of a finite number, is 2^127.
    bits = (jnp.clip(exponent, -127, 127) + 127) << 23
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


class _ShiftedNumbers(NamedTuple):
    """Holds numbers after an addition to their exponent bits.

    Attributes:
      value: x · 2^n, where `inside`.
      inside: whether x and x · 2^n are normal numbers.
      above: whether x is normal and x · 2^n is above the range.
    """

    value: jax.Array
    inside: jax.Array
    above: jax.Array


def _shift_exponent(x: jax.Array, exponent: jax.Array) -> _ShiftedNumbers:
    """Adds `exponent`, which broadcasts to `x`, to the exponent bits of floats.

    A product with 2^n would also be exact, but XLA's algebraic simplifier may reorder it. It turns
    (c · 8) · 2^126 into c · (8 · 2^126) = c · inf, which is NaN if c is zero.
    """
    kind = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{kind.bits}")
    most = (1 << kind.nexp) - 1  # the biased exponent of infinity
    n, bits = exponent.astype(integer), lax.bitcast_convert_type(x, integer)
    before = (bits >> kind.nmant) & most
    after = before + n
    normal = (before > 0) & (before < most)
    # Outside of the range this addition overflows into sign or mantissa; `inside` discards it.
    value = lax.bitcast_convert_type(bits + (n << kind.nmant), x.dtype)
    return _ShiftedNumbers(value, normal & (after > 0) & (after < most), normal & (after >= most))


@jax.custom_jvp
@jax.jit  # traced once for each shape
def ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x · 2^exponent, exactly, in float32 at least.

    Subnormal numbers and results below the normal range become zero, results above it infinite.
    Non-finite numbers do not change. `exponent` holds integers that broadcast to `x`.
    """
    x = widen(x)
    found = _shift_exponent(x, exponent)
    beyond = jnp.where(found.above, jnp.where(x < 0, -jnp.inf, jnp.inf), 0.0).astype(x.dtype)
    return jnp.where(jnp.isfinite(x), jnp.where(found.inside, found.value, beyond), x)


@jax.custom_jvp
@jax.jit
def divide_by_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x / 2^exponent for each example, (B, …) and (B,).

    The dtype is bfloat16, or float32 at least. The result is finite for every `x`: a select sets it
    to zero if x or the quotient is not a normal number. So is its product with a coefficient, which
    is zero if the coefficient is zero.
    """
    with jax.named_scope("over_power"):  # tests/clipped_grad/hlo_test.py looks for this name
        wide = widen(x)  # exact in both directions
        found = _shift_exponent(wide, -broadcast_examples(exponent, x))
        quotient = jnp.where(found.inside, found.value, 0.0)
        # float16 has too few exponent bits.
        return round_to_dtype(quotient, x.dtype) if x.dtype == jnp.bfloat16 else quotient


def broadcast_examples(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns values (B,) in a shape that broadcasts to x, (B, …)."""
    return values.reshape((-1,) + (1,) * (x.ndim - 1))


# Bit operations have no derivative, but the noise stage needs one to reject differentiation.
@ldexp.defjvp
def _ldexp_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    out = ldexp(*primals)
    return out, tangents[0].astype(out.dtype) * power_of_two(primals[1])


@divide_by_power.defjvp
def _divide_by_power_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x, exponent = primals
    out = divide_by_power(x, exponent)
    scale = power_of_two(-broadcast_examples(exponent, x)).astype(out.dtype)
    return out, jnp.where(out == 0, 0, tangents[0].astype(out.dtype) * scale)


def scale_formed(x: jax.Array, exponent: jax.Array) -> tuple[jax.Array, NormBounds]:
    """Divides a formed gradient, (B, …), by powers of two, and measures it."""
    x = widen(divide_by_power(x, exponent))
    return x, formed_bounds(x)


def formed_bounds(x: jax.Array) -> NormBounds:
    """Returns the norm bounds of formed gradients, (B, …), for entries up to about 1.

    The sum adds the numbers that are measured here, so S is the norm itself.
    """
    square = upper_square(widen(x))
    return NormBounds(square, jnp.sqrt(square))


def upper_square(x: jax.Array) -> jax.Array:
    """Returns an upper bound of ‖x‖² of each example, for entries up to about 1.

    The result is (B,), float32. Sums are taken in blocks of blocks, with barriers that keep the
    compiler from joining them. The error then grows with the length and depth of blocks, not with
    the number of entries.
    """
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    values, operations = jnp.square(flat).astype(jnp.float32), 2
    # `operations` counts the longest chain of roundings: the square, a block on each level, and
    # 1 + γ itself as a float.
    size = flat.shape[1]
    while values.shape[1] > _BLOCK:
        whole = values.shape[1] // _BLOCK * _BLOCK
        sums = values[:, :whole].reshape(x.shape[0], whole // _BLOCK, _BLOCK).sum(axis=-1)
        if whole < values.shape[1]:
            rest = values[:, whole:].sum(axis=-1, keepdims=True)
            sums = jnp.concatenate([sums, rest], axis=1)
        values = lax.optimization_barrier(sums)
        operations += _BLOCK
    operations += values.shape[1]
    # Rounding may have made the sum smaller by γ, and underflow by a constant for each entry.
    return values.sum(axis=1) * (1.0 + gamma(operations)) + size * _UNDERFLOW_LOSS**2


def underflow_loss(squares: int) -> np.float32:
    """Returns how much a sum of squares up to about 1 may lose to underflow."""
    return np.float32(squares * 2.0**-125)


def clip_coefficients(
    clip: Clip,
    scales: Scales,
    pieces: list[Piece],
    mask: jax.Array,
    *,
    group_count: int,
    tau: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the coefficient of each piece of each gradient. All clipping happens here.

    Args:
      clip: the geometry. Its factors satisfy t · factor(t) ≤ the bound of the group.
      scales: the divisors of all pieces.
      pieces: the pieces G', each divided by its power of two.
      mask: the examples that count, (B,) bool.
      group_count: the number of the clip's groups, including those without a piece.
      tau: τ, how much an example changes the rounding of the sum, relative to its bound.

    Returns:
      c (pieces, B) such that c G' is the clipped piece, upper bounds of the norms (B,) of the first
      group, and whether each example is used, (B,): it is finite and not masked.
    """
    check_settings()
    check_rounding(tau)
    if clip.sensitivity < _MINIMUM_BOUND:
        raise ValueError(
            f"The clipping bound must be at least {_MINIMUM_BOUND:.2g}, got {clip.sensitivity:g}. "
            "Smaller numbers may be flushed to zero in float32. Scale the loss and the bound by "
            "the same factor."
        )
    # If the compiler reorders sums, the bound does not hold, and no example is used.
    used = jnp.all(scales.finite, axis=(0, 1)) & mask & keeps_order(scales.exponent[0])
    groups = np.array([piece.group for piece in pieces])
    inside = (np.arange(group_count)[:, None] == groups)[:, :, None]  # (groups, pieces, 1)
    largest = jnp.max(jnp.where(inside, scales.exponent, ZERO_EXPONENT), axis=1)  # (groups, B)
    # Pieces of a group are scaled to the group's largest, so no square overflows.
    relative = power_of_two(jnp.clip(scales.exponent - largest[groups], -127, 0))
    # All terms are positive, so rounding is relative to the sum itself.
    room = 1.0 + gamma(len(groups) + COEFFICIENT_ROUNDINGS)

    def length(values: jax.Array) -> jax.Array:
        square = jnp.where(inside, jnp.square(values * relative), 0.0)
        return jnp.sqrt(room * (jnp.sum(square, axis=1) + underflow_loss(len(groups))))

    square, sizes = map(jnp.stack, zip(*(piece.size for piece in pieces), strict=True))
    errors, shares = np.array([piece.shares for piece in pieces], np.float32).T[:, :, None]
    norms, absolute = length(jnp.sqrt(square) + errors * sizes), length(shares * sizes)
    scale = power_of_two(jnp.clip(largest, *_EXPONENT_RANGE))
    # Bounds ‖f G‖ and f S/M, and leaves room for the rounding of the sum: `absolute` is S/M.
    longest = jnp.maximum(norms, absolute) * (scale * (1.0 + tau))
    factors = clip.factors(longest.T).T  # (groups, B)
    # Geometries that divide by the norm have no finite factor for a zero gradient, which adds zero.
    sound = used[None] & jnp.isfinite(norms + absolute) & jnp.isfinite(factors)
    factors = jnp.where(sound, factors * scale, 0.0)
    # Stored, so that parts that nearly cancel get exactly the same coefficient.
    return materialize(factors[groups] * relative), norms[0] * scale[0], used
