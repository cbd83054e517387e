"""What one example adds to a clipped sum at most, for the numbers as the machine computes them.

A gradient G that is summed as Σ_t r_t ⊗ c_t has, beside its norm n, an absolute size

    S = Σ_t ‖r_t‖‖c_t‖ ≥ n,

and everything that rounding does to it is relative to S, not to n: where terms cancel, n may be
all error. So no computed norm is trusted. It is replaced by an upper bound n⁺ ≥ n with the error
terms of its own computation added, whatever the order of the sums, and an example is scaled by

    f = factor((1 + τ) n⁺) · min(1, M n⁺/S),

a function of this example alone. Then ‖f G‖ ≤ C/(1 + τ) for every geometry with t · factor(t) ≤ C,
and f S ≤ M C/(1 + τ) bounds what the rounding of the sum can be relative to. What an example
changes in that is at most τ C/(1 + τ) (`_clip.block_sums`), so that with all rounding it moves the
sum by C. No branch reads the batch: what is done for one example does not depend on any other.

Magnitudes are carried apart. The numbers of one example are divided by powers of two of its own,
so that the largest is about 1 and squares neither overflow nor lose what counts. The division adds
integers to exponent bits (`over_power`): it is exact, no compiler can move it through a product,
and its result is finite whatever the input. Values that are not finite, or leave float32's range,
contribute exactly zero.

The rounding errors are bounded as usual: γ_k = k u/(1 − k u) for k operations with roundoff u
(Higham, "Accuracy and Stability of Numerical Algorithms", 2002, chapter 3).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._clip.clip import Clip
from dpoptax._clip.compiler_checks import check_settings, keeps_order
from dpoptax._tree import widen
from dpoptax._xla import materialize

# M for many terms. Training does not reach it: docs/bound.md has what was measured.
_LARGEST_RATIO = 2.0**5
# The roundoff of float32.
UNIT = 2.0**-24
# Of factors and gradients that were divided by their largest entry, squares lose at most so much of
# a norm, for each entry: half the exponents of the smallest normal number, with room for sums.
_LOST = 2.0**-58
# Roundings that a quotient or a root counts for: a GPU's are off by two units in the last place.
ROOT = 4
# Twice the roundings of the roots and quotients, and of all else, in a norm over S/M, a geometry's
# factor, and the coefficient made of them.
_FEW = 2 * (5 * ROOT + 7)
# Gradients outside these powers of two are taken for ones at the edge: as short beside any bound
# as they are anyway, or as long.
_EXPONENTS = (-126, 60)
# Sums below 2^-126 may be flushed to zero: beside γ of such a bound that is nothing. The steps of a
# grid are longer, as int32 holds 2³⁰ of a bound.
_LEAST_BOUND = 2.0**-80
# The exponent of a gradient that is exactly zero.
_NOTHING = -(2**20)
# Divided by 2 to this power, every number is zero (`over_power`).
ERASED = 2**20
_BLOCK = 128


def gamma(operations: float) -> float:
    """γ_k = k u/(1 − k u): the relative error of k operations in a row, at most."""
    if operations * UNIT >= 0.5:
        raise ValueError(
            f"a sum of {operations:g} terms with roundoff {UNIT:g} has no useful error bound: take "
            "a smaller microbatch, shorter sequences, or method='vmap'"
        )
    return operations * UNIT / (1.0 - operations * UNIT)


def largest_ratio(terms: int) -> float:
    """M for a gradient that is a sum of so many: eight times S/n of terms without any correlation.

    Of one term S is n.
    """
    return 1.0 if terms <= 1 else min(_LARGEST_RATIO, 8.0 * math.sqrt(terms))


def check_rounding(rounding: float) -> None:
    """Raises where τ leaves too little of the bound."""
    if rounding > 0.5:
        raise ValueError(
            f"one example could change the rounding of this sum by {rounding:.2g} times the clip's "
            "bound: take smaller batches, or sum in whole numbers with "
            "dpoptax.extend.fixed_point_grid"
        )


class Size(NamedTuple):
    """How large a piece of gradients is, (B,) each, over the powers of two of its scales.

    Attributes:
      square: upper bounds of ‖G‖².
      absolute: upper bounds of S.
    """

    square: jax.Array
    absolute: jax.Array


class Scales(NamedTuple):
    """What pieces of gradients were divided by: a power of two for each side and example.

    Attributes:
      exponent: that of all sides together, (pieces, B), int32; `_NOTHING` or below where the piece
        is exactly zero.
      finite: whether a side is, (pieces, sides, B).
    """

    exponent: jax.Array
    finite: jax.Array


def scales(tops: list[jax.Array]) -> tuple[jax.Array, Scales]:
    """Returns what each side is divided by, and the scales, from the largest entries (sides, B).

    The first are exponents of 2, (pieces, sides, B): 0 for a side that is zero or subnormal, and
    `ERASED` for one that is not finite.

    On CPU they are made in a loop, whose results XLA keeps: in one program with what reads them, it
    computes them once more in each of hundreds of kernels, and compiles those twice as long.
    """
    together = jnp.stack(tops)
    if not isinstance(together, jax.core.Tracer):  # each operation by itself: nothing is fused
        return _scales(together)
    return lax.platform_dependent(together, cpu=lambda x: lax.map(_scale, x), default=_scales)


def _scale(tops: jax.Array) -> tuple[jax.Array, Scales]:
    finite = jnp.isfinite(tops)
    found = exponent(jnp.where(finite, tops, 0.0))
    total = jnp.sum(found, axis=0, dtype=jnp.int32)
    divisor = jnp.where(found == _NOTHING, 0, found)
    return jnp.where(finite, divisor, ERASED), Scales(total, finite)


_scales = jax.vmap(_scale)


def top(x: jax.Array) -> jax.Array:
    """max |x| of each example, (B,) in float32; infinite where an entry is not finite."""
    # Not left to the maximum: of some shapes XLA's on CPU loses NaN.
    magnitude = jnp.abs(x)
    largest = jnp.where(magnitude <= jnp.finfo(x.dtype).max, magnitude, jnp.inf)
    return jnp.max(largest, axis=tuple(range(1, x.ndim)), initial=0.0).astype(jnp.float32)


def exponent(top: jax.Array) -> jax.Array:
    """⌊log₂ top⌋ for positive normal numbers, in int32; `_NOTHING` for what is smaller."""
    bits = lax.bitcast_convert_type(top, jnp.int32)
    found = (bits >> 23) - 127
    return jnp.where(found >= -126, found, _NOTHING)


def power(exponent: jax.Array) -> jax.Array:
    """2^exponent in float32, exactly; 0 below the normal range, and 2^127 above it."""
    bits = (jnp.clip(exponent, -127, 127) + 127) << 23
    return lax.bitcast_convert_type(bits.astype(jnp.int32), jnp.float32)


class _Shifted(NamedTuple):
    """Numbers whose exponent bits had an integer added, and where that is a product with 2^n.

    Attributes:
      value: x · 2^n, where `inside`.
      inside: x and x · 2^n are normal numbers.
      above: x is normal and x · 2^n is above the range.
    """

    value: jax.Array
    inside: jax.Array
    above: jax.Array


def _shifted(x: jax.Array, exponent: jax.Array) -> _Shifted:
    """Adds `exponent`, which broadcasts to `x`, to the exponent bits of float32 or float64.

    A product with 2^n would be exact too, but XLA's algebraic simplifier may move n elsewhere: of
    (c · 8) · 2^126 it makes c · (8 · 2^126) = c · inf, which is NaN where c is zero.
    """
    kind = jnp.finfo(x.dtype)
    integer = jnp.dtype(f"int{kind.bits}")
    # Of a normal number the biased exponent, in the bits of `infinity`, is from 1 to most - 1.
    most = (1 << kind.nexp) - 1
    infinity = most << kind.nmant
    n = jnp.clip(exponent, -most, most - 1).astype(integer)
    # Two limits for each n, and not two for each number: there are far fewer of them.
    least = jnp.clip(1 - n, 1, most) << kind.nmant
    largest = jnp.clip(most - 1 - n, 0, most - 1) << kind.nmant
    bits = lax.bitcast_convert_type(x, integer)
    biased = bits & infinity
    value = lax.bitcast_convert_type(bits + (n << kind.nmant), x.dtype)
    inside = (biased >= least) & (biased <= largest)
    return _Shifted(value, inside, (biased > largest) & (biased < infinity))


@jax.custom_jvp
def ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x · 2^exponent, exactly, in float32 at least.

    Zero for subnormal numbers and below the normal range, infinite above it; what is not finite
    stays so. `exponent` are integers that broadcast to `x`.
    """
    return _ldexp(x, exponent)


@jax.custom_jvp
def over_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x / 2^exponent for each example, (B, …) and (B,), in float32 at least or bfloat16.

    The result is finite whatever `x` is: zero by a select where x or the quotient is not a normal
    number. So no product with it can be anything but finite, and none with a weight of zero
    anything but zero.
    """
    return _over_power(x, exponent)


@jax.jit  # traced once for each shape
def _ldexp(x: jax.Array, exponent: jax.Array) -> jax.Array:
    x = widen(x)
    found = _shifted(x, exponent)
    beyond = jnp.where(found.above, jnp.where(x < 0, -jnp.inf, jnp.inf), 0.0).astype(x.dtype)
    return jnp.where(jnp.isfinite(x), jnp.where(found.inside, found.value, beyond), x)


@jax.jit
def _over_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    with jax.named_scope("over_power"):  # tests/hlo_test.py looks for it in compiled programs
        wide = widen(x)  # exact, there and back
        found = _shifted(wide, -by_example(exponent, x))
        quotient = jnp.where(found.inside, found.value, 0.0)
        # Not float16, which has no room for exponents.
        return quotient.astype(jnp.bfloat16) if x.dtype == jnp.bfloat16 else quotient


def by_example(values: jax.Array, x: jax.Array) -> jax.Array:
    """Returns values (B,) in a shape that broadcasts to x, (B, …)."""
    return values.reshape((-1,) + (1,) * (x.ndim - 1))


# Bits have no derivative, and without one the noise stage could not refuse to be differentiated.
@ldexp.defjvp
def _ldexp_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    out = ldexp(*primals)
    return out, tangents[0].astype(out.dtype) * power(primals[1])


@over_power.defjvp
def _over_power_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x, exponent = primals
    out = over_power(x, exponent)
    scale = power(-by_example(exponent, x)).astype(out.dtype)
    return out, jnp.where(out == 0, 0, tangents[0].astype(out.dtype) * scale)


def formed(x: jax.Array, exponent: jax.Array) -> tuple[jax.Array, Size]:
    """A formed gradient, (B, …), divided as `over_power` does, and its size.

    What is summed is what was measured, so S is the norm itself.
    """
    x = widen(over_power(x, exponent))
    square = upper_square(x)
    return x, Size(square, jnp.sqrt(square))


def upper_square(x: jax.Array) -> jax.Array:
    """An upper bound of ‖x‖² of each example, (B,) in float32, for entries of at most about 1.

    Sums are taken in blocks of blocks, with barriers that keep the compiler from joining them: the
    error grows with the blocks' length and depth, not with the number of entries.
    """
    flat = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    values, operations = jnp.square(flat).astype(jnp.float32), 1
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
    return values.sum(axis=1) * (1.0 + gamma(operations)) + size * _LOST**2


def coefficients(
    clip: Clip,
    scales: Scales,
    sizes: list[Size],
    groups: list[int],
    mask: jax.Array,
    *,
    layers: int,
    ratios: list[float],
    sum_error: float,
    rounding: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each piece of each gradient is multiplied by: the one place where examples are clipped.

    Args:
      clip: the geometry, whose factors obey t · factor(t) ≤ its bound for the group.
      scales: of all pieces. Pieces share no coordinate.
      sizes: of each piece.
      groups: the clip's group of each piece.
      mask: which examples count, (B,) bool.
      layers: how many groups there are, with those of no piece.
      ratios: M of each piece: its terms times c are at most M times the clip's bound. Of several
        pieces, √(Σ_p (c S_p/M_p)²) is at most the bound.
      sum_error: how far the summand may be from its coefficient times the piece, relative to S.
      rounding: τ, what an example changes in the rounding of the sum, relative to its bound.

    Returns:
      c (pieces, B) such that c G' is the clipped piece; upper bounds of the norms (B,) of the
      first group, and the examples that are used: finite and not masked.
    """
    check_settings()
    check_rounding(rounding)
    if clip.sensitivity < _LEAST_BOUND:
        raise ValueError(
            f"the clip's bound {clip.sensitivity:g} is too near the end of float32: where sums of "
            "such numbers, or the steps of their grid, are flushed to zero, one example could move "
            "them by more; scale the loss, and the bound with it"
        )
    # Where the compiler reorders sums, no example is used: nothing of the bound would hold.
    used = jnp.all(scales.finite, axis=(0, 1)) & mask & keeps_order(scales.exponent[0])
    member = np.arange(layers)[:, None] == np.array(groups)  # (groups, pieces)
    inside = member[:, :, None]
    largest = jnp.max(jnp.where(inside, scales.exponent, _NOTHING), axis=1)  # (groups, B)
    relative = power(jnp.clip(scales.exponent - largest[np.array(groups)], -127, 0))
    # Sums of positive terms, whose rounding is relative to themselves.
    room = 1.0 + gamma(len(groups) + _FEW)

    def length(values: jax.Array) -> jax.Array:
        square = jnp.where(inside, jnp.square(values * relative), 0.0)
        return jnp.sqrt(room * jnp.sum(square, axis=1))

    square, absolutes = map(jnp.stack, zip(*sizes, strict=True))
    norms = length(jnp.sqrt(square)) + sum_error * length(absolutes)
    absolute = length(absolutes / np.array(ratios, np.float32)[:, None])
    scale = power(jnp.clip(largest, *_EXPONENTS))
    factors = clip.factors((norms * (scale * (1.0 + rounding))).T).T  # (groups, B)
    ratio = jnp.minimum(1.0, norms / jnp.where(absolute > 0, absolute, 1.0))
    # A geometry that divides by the norm has no factor for a gradient of zero: that adds zero too.
    sound = used[None] & jnp.isfinite(norms) & jnp.isfinite(factors)
    factors = jnp.where(sound, factors * ratio * scale, 0.0)
    # Parts that all but cancel have one coefficient, to the last place.
    found = materialize(factors[np.array(groups)] * relative)
    return found, norms[0] * scale[0], used
