"""Discrete Gaussian noise: integers whose probabilities are known to 2⁻⁸⁰."""

import decimal
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._random.keys import check_noise_key, words_at
from dpoptax._random.threefry import places

# Discrete Gaussians of at least this standard deviation add up, and round, like continuous ones:
# sums over the integers are integrals to a relative 2 exp(−2π² 1.8²) < 2⁻⁹¹.
SMOOTHING = 1.8
# Beyond so many standard deviations there is less than 2⁻⁹⁸ of a discrete Gaussian.
_TAIL = 11.7
# So a sum of two stays within so many of its own: 11.7 √2, and what rounding adds.
REACH = 17.0
# Probabilities in a table are multiples of 2⁻⁹⁵: of three words of hash one bit is the sign.
_BITS = 95
_WORD = 2**32 - 1
# Of hashes: `jax.random` has 0 for the same key, and noise in floating point 1.
_STREAMS = (2, 3, 4)


def discrete_gaussian(
    key: jax.Array,
    shape: Sequence[int],
    stddev: float,
    *,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Draw integers n with probabilities proportional to exp(−n²/2s²), s = `stddev`.

        n = a Z₁ + (a − 1) Z₂,   Zᵢ of the same law with s₀² = s²/(a² + (a − 1)²)

    for the largest a that leaves s₀²/s at least `SMOOTHING`. Each Zᵢ is drawn from a table of its
    law, exact to 2⁻⁹⁵, by three words of threefry, with Walker's alias method: one entry of the
    table, a comparison of integers, a sign. So nothing is rounded, the values are the same on every
    device and in every layout, and the law is a theorem about them, as long as words of the hash
    are independent and uniform:

    Each number is, but for an event of probability 2⁻⁷⁹, one whose probabilities are the discrete
    Gaussian's to a factor 1 ± 2⁻⁹⁰. Proof in docs/privacy/noise.md.

    Args:
      key: a key of threefry.
      shape: the shape of the result.
      stddev: s, at least `SMOOTHING` and at most some 2²².
      out_sharding: the sharding of the result, under explicit axes.

    Source: C. Canonne, G. Kamath and T. Steinke, "The discrete Gaussian for differential privacy",
    2020, for its use; D. Micciancio and M. Walter, "Gaussian sampling over the integers", 2017, for
    sums of two; A. Walker, 1977, and M. Vose, 1991, for the table.

    >>> discrete_gaussian(jax.random.key(0), (3,), 1000.0).dtype
    dtype('int32')

    """
    place = places(tuple(shape), out_sharding=out_sharding)
    return discrete_gaussian_at(check_noise_key(key), place, stddev, out_sharding=out_sharding)


def discrete_gaussian_at(
    key: jax.Array,
    place: jax.Array,
    stddev: float,
    *,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """The number at each place; of one key, or of one for each."""
    words = words_at(key, place, _STREAMS)
    larger, smaller = _factors(stddev)
    drawn = larger * _draw(words[:3], stddev, out_sharding)
    return drawn + smaller * _draw(words[3:], stddev, out_sharding) if smaller else drawn


def _factors(stddev: float) -> tuple[int, int]:
    """a and a − 1: they have no common divisor, and so reach every integer."""
    larger = 1
    while (larger + 1) ** 2 + larger**2 <= stddev / SMOOTHING:
        larger += 1
    return larger, larger - 1


def _draw(
    words: Sequence[jax.Array], stddev: float, out_sharding: jax.sharding.NamedSharding | None
) -> jax.Array:
    """Z, of 96 bits: its sign, an entry of the table, and what is compared with its share."""
    bits, columns = _table(stddev)
    first, middle, last = words
    entry = (first << 1) >> (32 - bits)
    other, *share = (
        jnp.asarray(column).at[entry].get(mode="promise_in_bounds", out_sharding=out_sharding)
        for column in columns
    )
    below = last < share[2]
    for word, part in ((middle, share[1]), (first & (_WORD >> (1 + bits)), share[0])):
        below = (word < part) | ((word == part) & below)
    size = jnp.where(below, entry, other).astype(jnp.int32)
    return jnp.where(first >> 31 == 1, -size, size)


@functools.lru_cache(maxsize=16)
def _table(stddev: float) -> tuple[int, tuple[np.ndarray, ...]]:
    """|Z|'s law as 2^bits entries of equal weight, and the four words of each.

    An entry k stands for k below its share of the weight, and for one other number above it: that
    number is the first word, and the share, of 95 − bits bits, the others. Each word is read once:
    what two read, XLA looks up apart, and computes all hashes for it anew.
    """
    counts = _counts(stddev)
    bits = (len(counts) - 1).bit_length()
    weight = 2 ** (_BITS - bits)
    counts += [0] * (2**bits - len(counts))
    shares, others = [0] * len(counts), list(range(len(counts)))  # all of its own weight: either
    small = [k for k, count in enumerate(counts) if count < weight]
    large = [k for k, count in enumerate(counts) if count >= weight]
    while small:
        k = small.pop()
        shares[k], others[k] = counts[k], large[-1]
        counts[large[-1]] -= weight - counts[k]
        if counts[large[-1]] < weight:
            small.append(large.pop())
    words = [[share >> shift & _WORD for share in shares] for shift in (64, 32, 0)]
    other, first, middle, last = (np.array(column, np.uint32) for column in (others, *words))
    return bits, (other, first, middle, last)


def _counts(stddev: float) -> list[int]:
    """The probabilities of |Z| = 0, 1, … in units of 2⁻⁹⁵."""
    squares = sum(factor**2 for factor in _factors(stddev))
    with decimal.localcontext(prec=60):
        ratio = (-squares / (2 * decimal.Decimal(stddev) ** 2)).exp()
        weights, weight, square = [decimal.Decimal(1)], decimal.Decimal(2), ratio * ratio
        for _ in range(math.ceil(_TAIL * stddev / math.sqrt(squares))):
            weight *= ratio
            ratio *= square
            weights.append(weight)
        unit = 2**_BITS / sum(weights)
        counts = [int((weight * unit).to_integral_value()) for weight in weights]
    counts[0] += 2**_BITS - sum(counts)
    return counts
