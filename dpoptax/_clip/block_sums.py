"""Sums over examples, and what one example changes in their rounding at most.

What an example moves in a sum is what it adds, and what it changes in the rounding of the terms
behind it. One after the other, B of them can be chosen so that each rounds the other way: in pairs
of blocks of b examples, those of its block alone do, and one addition in each level above. So much
is bounded for any data and any order within a block: with S_i the absolute size of what example i
adds, f_i S_i ≤ M C, the sum of a block of k terms is off by at most γ_k Σ_i f_i S_i ≤ γ_k b M C.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._clip.bounds import UNIT, gamma, ldexp
from dpoptax._tree import float32_at_least

BLOCK = 32
"""The most examples of one term each that are summed in one piece."""

MOST = 2.0**-7
"""What one example may change in the rounding of a part of a sum, relative to C.

Blocks are as short as that takes, and sums that could not keep it are taken in whole numbers.
"""

FEW = 8
"""So many totals, of microbatches or devices, are added in floating point."""

# Terms that a block has at least, and numbers that the results of blocks that are shorter than they
# may be have at most: so many stay in a cache.
_LEAST_TERMS = 128
_ENTRIES_IN_CACHE = 2**16
# A sum is rounded once with an example and once without, relative to what rounding made of it.
_TWICE = 2.02 * UNIT
# The sums above its block that an example is in have so many times B examples, all together.
_ABOVE = 3


@dataclasses.dataclass(frozen=True)
class Rounding:
    """What one example changes in the rounding of a sum, relative to C, but for what it adds.

    Attributes:
      length: of the blocks, the most examples of one.
      in_blocks: what it changes in its block.
      joined: in the sums above blocks, and in what is added one after the other.
      own: in what is rounded of its own summand, and of the entries that it adds to.
      by_terms: whether what is joined are terms, f S ≤ M C, and not whole summands, f n ≤ C.
    """

    length: int = 0
    in_blocks: float = 0.0
    joined: float = 0.0
    own: float = 0.0
    by_terms: bool = False


def together(roundings: Iterable[Rounding]) -> float:
    """τ of sums that share no coordinate, such as those of parameters.

    Of blocks of one length, what is lost in all is at most γ Σ_i f_i S_i, with S_i that of the
    whole gradient (Minkowski), so that the largest counts. Those of different lengths are of
    different coordinates: the root of the sum of squares. So are, above blocks, those that count by
    their norms and those that count by their terms: an example may have C of either.
    """
    by_length: dict[int, float] = {}
    joined = {False: 0.0, True: 0.0}
    own = 0.0
    for each in roundings:
        by_length[each.length] = max(each.in_blocks, by_length.get(each.length, 0.0))
        joined[each.by_terms] = max(each.joined, joined[each.by_terms])
        own += each.own
    return math.hypot(*by_length.values()) + math.hypot(*joined.values()) + own


class Whole(NamedTuple):
    """The batch that a sum is a part of.

    Attributes:
      examples: B, those of all microbatches and devices.
      devices: that share them.
    """

    examples: int
    devices: int = 1


def of_layouts(whole: Whole) -> float:
    """τ of adding up the totals of microbatches and devices: the same for up to FEW of each.

    So many are added in any order: the sums that an example is in have at most (FEW + 1)/2 · B
    examples together and an eighth as many more, on a device and over devices. More devices are,
    too, as long as that changes little, and then in whole numbers, which rounds once; so do more
    microbatches, with what rounding takes off carried along (`add_to`).
    """
    devices = FEW if in_whole_numbers(whole) else max(FEW, whole.devices)
    return _over_devices(devices, whole.examples) * (1.0 + 1.0 / FEW)


def tau(whole: Whole, roundings: Iterable[Rounding] = ()) -> float:
    """τ of the clipped sum of a batch: of formed gradients, of such sums beside, and of layouts."""
    formed = rounding_in_blocks(whole.examples, BLOCK)
    return together([*roundings, formed]) + of_layouts(whole)


def in_whole_numbers(whole: Whole) -> bool:
    """Whether the totals of devices are added as integers."""
    return whole.devices > FEW and _over_devices(whole.devices, whole.examples) > 2.0 * MOST


def _over_devices(devices: int, examples: int) -> float:
    return _TWICE * (devices + 1) / 2 * examples


def of_parts(parts: int, examples: int) -> float:
    """τ of adding up as many totals, of so many examples together, one after the other."""
    return _TWICE * (parts - 1) * examples


def block_length(examples: int, terms: int, entries: int, ratio: float) -> int:
    """How many examples are summed in one piece, in which each has so many terms.

    Args:
      examples: B.
      terms: of each entry of an example's summand.
      entries: of the sum.
      ratio: M, at which f S ≤ M C.
    """
    most = math.isqrt(int(MOST / (2.0 * UNIT * terms * ratio)))
    least = max(-(-_LEAST_TERMS // terms), -(-examples * entries // _ENTRIES_IN_CACHE))
    return max(1, min(most, least))


def rounding_in_blocks(
    examples: int, block: int, *, terms: int = 1, ratio: float = 1.0, whole: float = 1.0
) -> Rounding:
    """What one example changes in a sum by `in_blocks`, or in several with parts of its terms.

    Args:
      examples: B.
      block: b, the most examples of a block.
      terms: of each entry of an example's summand.
      ratio: M, at which f S ≤ M C.
      whole: what an example's summand is at most, relative to C.
    """
    length = min(block, examples)
    above = _TWICE * _ABOVE * examples * whole if examples > block else 0.0
    return Rounding(length, 2.0 * gamma(length * terms) * length * ratio, above)


def in_blocks(
    block_sum: Callable[..., jax.Array], *terms: jax.Array, block: int = BLOCK
) -> jax.Array:
    """Sums over the leading axis by `block_sum` of parts of it, and the results in pairs.

    Args:
      block_sum: of arrays (b, …), the sum over the first axis; rows of zeros add nothing.
      terms: arrays (B, …).
      block: the most examples of a part.
    """
    size = terms[0].shape[0]
    if size <= block:
        return block_sum(*terms)
    # Where no length down to a quarter divides the batch, it is padded.
    lengths = (n for n in range(block, block // 4 - 1, -1) if size % n == 0)
    length = next(lengths, block)

    def cut(x: jax.Array) -> jax.Array:
        if size % length:
            x = jnp.pad(x, [(0, -size % length)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, length, *x.shape[1:])

    return _in_pairs(jax.vmap(block_sum)(*map(cut, terms)))


def _in_pairs(x: jax.Array) -> jax.Array:
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        sums = x[:half] + x[half : 2 * half]
        # The barrier keeps the compiler from writing all levels out for each entry.
        x = lax.optimization_barrier(jnp.concatenate([sums, x[2 * half :]]))
    return x[0]


def weighted(weights: jax.Array, values: jax.Array, *, block: int = BLOCK) -> jax.Array:
    """Σ_i weights[i] values[i], for (B,) and (B, …), at full precision on every platform.

    What one example changes in its rounding is `rounding_in_blocks(B, block)`.
    """

    def block_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum("b,b...->...", weights, values, precision=lax.Precision.HIGHEST)

    return in_blocks(block_sum, weights, values, block=block)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Numbers as whole multiples of two powers of two, whose sums are exact in any order.

    A number is rounded to whole steps g = 2^-exponent, and what that takes off it to fine ones of
    2^-finer g. Whole steps that overflow on the way come back: integers add up modulo their range,
    in which the total is. The fine ones do not overflow.

    Attributes:
      exponent: such that totals and all that is added are at most 2³⁰ steps (2⁶² in float64).
      finer: 30 − ⌈log₂ N⌉ for N numbers that are added to an entry.
    """

    exponent: int
    finer: int

    def of(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whole and fine steps of values in float32 or float64."""
        kind = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
        # Fused with a product, the difference below would include the rounding of `values`, and
        # integers may not hold the sum of that.
        scaled = ldexp(values, jnp.int32(self.exponent))
        whole = jnp.round(scaled)
        return whole.astype(kind), jnp.round((scaled - whole) * 2.0**self.finer).astype(kind)

    def numbers(self, whole: jax.Array, fine: jax.Array) -> jax.Array:
        """The sums of both as numbers, rounded once."""
        kind = jnp.float64 if whole.dtype == jnp.int64 else jnp.float32
        whole, fine = whole + (fine >> self.finer), fine & (2**self.finer - 1)
        high = (whole >> 12) << 12  # a float holds it, and the rest
        low = (whole - high).astype(kind) + fine.astype(kind) * 2.0**-self.finer
        return (high.astype(kind) + low) * 2.0**-self.exponent


def steps(largest: float, count: int, *, bits: int = 30) -> Steps:
    """Steps for `count` numbers at each entry, that and whose totals are at most `largest`.

    Raises:
      ValueError: numbers for which the power of two is none of float32's.
    """
    exponent = bits - math.ceil(math.log2(largest))
    if abs(exponent) > 126:
        raise ValueError(
            f"sums of up to {largest:g}, from the clip's bound, are too far from 1 for float32: "
            "scale the loss, and the bound with it"
        )
    return Steps(exponent, _finer(count, bits))


def _finer(count: int, bits: int = 30) -> int:
    """Bits of the fine steps, such that so many of at most half a whole step fit."""
    return max(0, bits - math.ceil(math.log2(count or 1)))


def rounding_in_steps(
    count: int, rows: int, columns: int, largest: float, examples: float
) -> Rounding:
    """What one example changes in a sum by `steps`, each relative to C.

    Half a fine step for each number that it adds, and what rounds where the sums of the entries
    that it adds to become floats: fine steps below a whole one, these with the 2¹² whole ones that
    are not in the high part, and all. Steps are relative to C, where the rest is to C/(1 + τ),
    τ ≤ 1/2: half as much more.

    Args:
      count: of numbers at an entry, all examples together.
      rows: T, how many an example adds, which may be one so many times.
      columns: the entries of a row.
      largest: as for `steps`.
      examples: what the sum is at most.
    """
    # Steps are at most twice what they need to be.
    whole = 2.0**-29 * largest
    fine = whole * 2.0 ** -_finer(count)
    added = 0.5 * fine * rows * math.sqrt(columns)
    low = _TWICE * 2**12 * whole * math.sqrt(rows * columns)
    return Rounding(joined=_TWICE * examples, own=1.5 * (added + low))


def of_lookups(
    lookups: Sequence[tuple[jax.Array, jax.Array]],
    size: int,
    *,
    terms: int,
    examples: int,
    bound: float,
    ratio: float,
    whole: float,
) -> jax.Array:
    """Σ over lookups, of one row each, of what they add to it: a table (size, C).

    A scatter adds one after the other. Where one example could change much in that, numbers are
    added as `steps`. See `rounding_of_lookups`.

    Args:
      lookups: rows (N,), integers, and values (N, C). No value is above `ratio` · `bound`.
      size: the number of rows.
      terms: T, the lookups of one example.
      examples: B, at least those of the lookups: of all microbatches and devices.
      bound: C.
      ratio: M, at which f S ≤ M C.
      whole: what all lookups of one example add to an entry at most, relative to C.

    Raises:
      ValueError: a `bound` for which the power of two is none of float32's.
    """
    wide = float32_at_least(*(values for _, values in lookups))
    table: jax.Array = jnp.zeros((size, lookups[0][1].shape[-1]), wide)
    count = terms * examples
    if _by_scatter(terms, examples, ratio) is not None:
        for rows, values in lookups:
            table = table.at[rows].add(values.astype(wide))
        return table
    bits = 62 if wide == jnp.float64 else 30
    exact = steps(max(examples * whole, ratio) * bound, count, bits=bits)
    coarse = fine = table.astype(jnp.int64 if wide == jnp.float64 else jnp.int32)
    for rows, values in lookups:
        parts = exact.of(values.astype(wide))
        coarse, fine = coarse.at[rows].add(parts[0]), fine.at[rows].add(parts[1])
    return exact.numbers(coarse, fine)


def rounding_of_lookups(
    columns: int, *, terms: int, examples: int, ratio: float, whole: float
) -> Rounding:
    """What one example changes in a sum by `of_lookups`, of rows of so many entries."""
    rounding = _by_scatter(terms, examples, ratio)
    if rounding is None:
        largest = max(examples * whole, ratio)
        rounding = rounding_in_steps(terms * examples, terms, columns, largest, examples * whole)
    return rounding


def _by_scatter(terms: int, examples: int, ratio: float) -> Rounding | None:
    """What one example changes where one lookup is added after the other; `None` for too much."""
    if terms * examples * UNIT >= 0.5:
        return None
    change = rounding_in_blocks(examples, examples, terms=terms, ratio=ratio).in_blocks
    return Rounding(joined=change, by_terms=True) if change <= MOST else None


def add(total: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of two arrays of floats, and what its rounding took off, exactly.

    Source: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    """
    found = total + value
    other = found - total
    return found, (total - (found - other)) + (value - other)


def add_to(total: jax.Array, lost: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A total with a value more, and what rounding took off it and the totals before.

    What was taken off goes back where it counts, and so stays below the total's last place: left to
    add up, that of K values would be rounded by K² of its own roundings.
    """
    total, off = add(total, value)
    return add(total, lost + off)
