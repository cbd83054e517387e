"""Draws discrete Gaussian noise with probabilities that are exact to 2⁻⁸⁰."""

import decimal
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpoptax._random.keys import check_noise_key, words_at
from dpoptax._support.xla import places

# Discrete Gaussians with at least this standard deviation add and round like continuous ones: sums
# over the integers equal integrals up to a relative error of 2 exp(−2π² 1.8²) < 2⁻⁹¹.
SMOOTHING = 1.8
# The mass of a discrete Gaussian beyond this many standard deviations is less than 2⁻⁹⁸.
_TAIL = 11.7
# A sum of two draws stays within this many of its standard deviations: 11.7 √2 plus rounding.
REACH = 17.0
# Probabilities in a table are multiples of 2⁻⁹⁵: three words of a hash, except one bit for the
# sign.
_BITS = 95
_WORD = 2**32 - 1
# Streams of hashes. `jax.random` uses stream 0 of the same key, and floating-point noise stream 1.
_STREAMS = (2, 3, 4)


def discrete_gaussian(
    key: jax.Array,
    shape: Sequence[int],
    stddev: float,
    *,
    leaf: ArrayLike = 0,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Draws integers n with probabilities proportional to exp(−n²/2s²), s = `stddev`.

        n = a Z₁ + (a − 1) Z₂,   Zᵢ discrete Gaussian with s₀² = s²/(a² + (a − 1)²)

    a is the largest integer for which s₀²/s is at least `SMOOTHING`. Walker's alias method draws
    each Zᵢ from a table that is exact to 2⁻⁹⁵, using three words of a hash. A draw needs one table
    entry, one comparison of integers, and a sign. Nothing is rounded, so the values are the same on
    every device and in every layout.

    If the words of the hash are independent and uniform, each number has the probabilities of the
    discrete Gaussian up to a factor 1 ± 2⁻⁹⁰, except for an event of probability 2⁻⁷⁹. The proof is
    in docs/developers/fixed-point.md.

    Args:
      key: a key of threefry or ChaCha20.
      shape: the shape of the result.
      stddev: s, between `SMOOTHING` and about 2²².
      leaf: the number of the result among those that are drawn with the same key.
      out_sharding: the sharding of the result, for explicit axes.

    Source: C. Canonne, G. Kamath and T. Steinke, "The discrete Gaussian for differential privacy",
    2020; for sums of two, D. Micciancio and M. Walter, "Gaussian sampling over the integers", 2017;
    for the table, A. Walker, 1977, and M. Vose, 1991.

    >>> discrete_gaussian(jax.random.key(0), (3,), 1000.0).dtype
    dtype('int32')

    """
    place = places(tuple(shape), out_sharding=out_sharding)
    words = words_at(check_noise_key(key), leaf, place, _STREAMS)
    larger, smaller = _factors(stddev)
    drawn = larger * _draw(words[:3], stddev, out_sharding)
    return drawn + smaller * _draw(words[3:], stddev, out_sharding) if smaller else drawn


def _factors(stddev: float) -> tuple[int, int]:
    """Returns a and a − 1, which are coprime and so reach every integer."""
    larger = 1
    while (larger + 1) ** 2 + larger**2 <= stddev / SMOOTHING:
        larger += 1
    return larger, larger - 1


def _draw(
    words: Sequence[jax.Array], stddev: float, out_sharding: jax.sharding.NamedSharding | None
) -> jax.Array:
    """Draws Z from 96 bits: a sign, a table entry, and a number.

    The entry has two values. Comparing the number with the entry's share selects one of them.
    """
    bits, columns = _table(stddev)
    first, middle, last = words
    entry = (first << 1) >> (32 - bits)
    other, *share = (
        jnp.asarray(column).at[entry].get(mode="promise_in_bounds", out_sharding=out_sharding)
        for column in columns
    )
    # Compares numbers of 95 − bits bits, starting with the lowest word.
    below = last < share[2]
    for word, part in ((middle, share[1]), (first & (_WORD >> (1 + bits)), share[0])):
        below = (word < part) | ((word == part) & below)
    size = jnp.where(below, entry, other).astype(jnp.int32)
    return jnp.where(first >> 31 == 1, -size, size)


@functools.lru_cache(maxsize=16)
def _table(stddev: float) -> tuple[int, tuple[np.ndarray, ...]]:
    """Returns the distribution of |Z| as 2^bits entries of equal weight.

    Entry k gives k below its share of the weight, and one other number above. Its first word is
    that number. The other three words hold the share, which has 95 − bits bits. Each word is looked
    up once, because XLA would compute all hashes again for a second lookup.
    """
    counts = _counts(stddev)
    bits = (len(counts) - 1).bit_length()
    weight = 2 ** (_BITS - bits)
    counts += [0] * (2**bits - len(counts))
    # An entry with exactly its own weight gives k in both cases.
    shares, others = [0] * len(counts), list(range(len(counts)))
    small = [k for k, count in enumerate(counts) if count < weight]
    large = [k for k, count in enumerate(counts) if count >= weight]
    # Vose's method: the rest of each small entry's weight comes from a large one.
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
    """Returns the probabilities of |Z| = 0, 1, … in units of 2⁻⁹⁵."""
    squares = sum(factor**2 for factor in _factors(stddev))
    with decimal.localcontext(prec=60):
        ratio = (-squares / (2 * decimal.Decimal(stddev) ** 2)).exp()
        weights, weight, square = [decimal.Decimal(1)], decimal.Decimal(2), ratio * ratio
        # Weights 2 exp(−k²/2s₀²) for k = 1, 2, …. Their ratios form a geometric sequence.
        for _ in range(math.ceil(_TAIL * stddev / math.sqrt(squares))):
            weight *= ratio
            ratio *= square
            weights.append(weight)
        unit = 2**_BITS / sum(weights)
        counts = [int((weight * unit).to_integral_value()) for weight in weights]
    counts[0] += 2**_BITS - sum(counts)  # so that the probabilities sum to 1
    return counts
