"""Sums over examples, and bounds how one example changes the rounding of the sum.

An example changes a sum by its own summand, and by changing the rounding of all terms added after
it. If B terms are added one after the other, an adversary can choose them so that each is rounded
the other way. Here, blocks of b examples are summed first, and then their results in pairs. An
example then changes the rounding only in its own block and in one addition on each level above. The
change is bounded for any data and any order within a block. Let S_i be the absolute size of the
summand of example i, with f_i S_i ≤ M C. The error of the sum of a block with k terms is at most
γ_k Σ_i f_i S_i ≤ γ_k b M C.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._clip.bounds import UNIT_ROUNDOFF, gamma, ldexp
from dpoptax._tree import float32_at_least

BLOCK_LENGTH = 32
"""The maximum number of examples in a block, if each has one term."""

ROUNDING_LIMIT = 2.0**-7
"""How much one example may change the rounding of a part of a sum, relative to C.

Blocks are short enough to stay within this limit. Sums that could exceed it use integers.
"""

FLOAT_TOTALS = 8
"""The number of micro-batches or devices up to which totals are added as floats."""

# A block has at least this many terms. Blocks become longer if their results would have more than
# `_CACHED_ENTRIES` entries, so that the results stay in a cache.
_MINIMUM_TERMS = 128
_CACHED_ENTRIES = 2**16
# A sum is rounded once with an example and once without it, relative to the rounded sum.
_TWO_ROUNDINGS = 2.02 * UNIT_ROUNDOFF
# The sums above blocks that include an example have at most 3 B examples together.
#
# In pairs, on H levels, the last sum has B examples. The sum h levels before it has at most
# 2^(H - h) blocks. There are more than 2^(H - 1) blocks, so these have fewer than 2^(1 - h) B
# examples. Together: B + B + B/2 + B/4 + … ≤ 3 B.
#
# In a loop over n blocks, the sums have 2, 3, …, n blocks, together (n + 1)/2 · B − B/n examples,
# or 2.8 B for n = 5. If rounding errors are carried along, only the last sum counts, with B. The
# carried errors lose at most 4 n u² B, with the example and without it, which is less than 4 u B
# for n ≤ 2^24.
_SUMS_ABOVE_BLOCKS = 3
_PLAIN_SUMS = 5


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Bounds how much one example changes the rounding of a sum, relative to C.

    Its own summand is not included.

    Attributes:
      length: the maximum number of examples in a block.
      blocks: the change within its block.
      joined: the change in the sums above blocks, and in sums taken one term after the other.
      own: the rounding of the summand itself, and of the entries that it adds to.
      termwise: whether `joined` is bounded by terms, f S ≤ M C, instead of whole summands, f n ≤ C.
    """

    length: int = 0
    blocks: float = 0.0
    joined: float = 0.0
    own: float = 0.0
    termwise: bool = False


def combine_roundings(roundings: Iterable[Rounding], *, shared: bool = False) -> float:
    """Returns τ of sums that share no coordinate, such as those of several parameters.

    For blocks of one length, the total error is at most γ Σ_i f_i S_i, with S_i of the whole
    gradient (Minkowski's inequality), so the largest change counts. Blocks of different lengths
    cover different coordinates, so the squares of their changes add up. The same holds above blocks
    for sums bounded by norms and sums bounded by terms, since an example may reach both bounds. If
    sums are `shared`, such as those of several uses of one parameter, the changes themselves add
    up.
    """
    block_changes: dict[int, float] = {}
    joined = {False: 0.0, True: 0.0}
    own = 0.0
    for each in roundings:
        block_changes[each.length] = max(each.blocks, block_changes.get(each.length, 0.0))
        joined[each.termwise] = max(each.joined, joined[each.termwise])
        own += each.own

    def join(changes: Iterable[float]) -> float:
        return math.fsum(changes) if shared else math.hypot(*changes)

    return join(block_changes.values()) + join(joined.values()) + own


class WholeBatch(NamedTuple):
    """Describes the whole batch to which the examples of a sum belong.

    Attributes:
      examples: B, the examples of all micro-batches and devices.
      devices: the number of devices that share them.
    """

    examples: int
    devices: int = 1


def layout_rounding(whole: WholeBatch) -> float:
    """Returns τ of adding the totals of micro-batches and devices.

    τ is the same for up to `FLOAT_TOTALS` of each, which are added in any order. The sums over
    devices that include an example have at most (`FLOAT_TOTALS` + 1)/2 · B examples together, and
    the sums over micro-batches on a device an eighth as many. The totals of more devices are also
    added as floats if the rounding changes little, and otherwise as integers, which rounds once.
    The totals of more micro-batches are added with the rounding error carried along
    (`compensated_add`).
    """
    # At least FLOAT_TOTALS, so that τ does not depend on a small number of devices.
    devices = FLOAT_TOTALS if uses_integer_totals(whole) else max(FLOAT_TOTALS, whole.devices)
    return _device_rounding(devices, whole.examples) * (1.0 + 1.0 / FLOAT_TOTALS)


def tau(whole: WholeBatch, roundings: Iterable[Rounding] = (), *, shared: bool = False) -> float:
    """Returns τ of the clipped sum of a batch.

    It includes the sums of formed gradients, other sums with the given `roundings`, and the layout.
    `shared` says whether several sums may be added to one entry.
    """
    formed = block_rounding(whole.examples, BLOCK_LENGTH)
    return combine_roundings([*roundings, formed], shared=shared) + layout_rounding(whole)


def uses_integer_totals(whole: WholeBatch) -> bool:
    """Returns whether the totals of devices are added as integers."""
    return (
        whole.devices > FLOAT_TOTALS
        and _device_rounding(whole.devices, whole.examples) > 2.0 * ROUNDING_LIMIT
    )


def _device_rounding(devices: int, examples: int) -> float:
    return _TWO_ROUNDINGS * (devices + 1) / 2 * examples


def parts_rounding(parts: int, examples: int) -> float:
    """Returns τ of adding this many totals of all examples, one after the other."""
    return _TWO_ROUNDINGS * (parts - 1) * examples


def block_length(examples: int, terms: int, entries: int, ratio: float) -> int:
    """Returns the number of examples in a block.

    Args:
      examples: B.
      terms: the terms of each entry of an example's summand.
      entries: the number of entries of the sum.
      ratio: M, such that f S ≤ M C.
    """
    # The longest block within the limit, since `block_rounding` is about 2 u b² L M.
    most = math.isqrt(int(ROUNDING_LIMIT / (2.0 * UNIT_ROUNDOFF * terms * ratio)))
    least = max(-(-_MINIMUM_TERMS // terms), -(-examples * entries // _CACHED_ENTRIES))
    return max(1, min(most, least))


def block_rounding(
    examples: int, block: int, *, terms: int = 1, ratio: float = 1.0, largest_summand: float = 1.0
) -> Rounding:
    """Bounds how one example changes the rounding of `sum_in_blocks`.

    The bound also holds for several sums together, if they share no coordinate.

    Args:
      examples: B.
      block: b, the maximum number of examples in a block.
      terms: the terms of each entry of an example's summand.
      ratio: M, such that f S ≤ M C.
      largest_summand: an upper bound of an example's summand, relative to C.
    """
    length = min(block, examples)
    above = _SUMS_ABOVE_BLOCKS * examples * largest_summand if examples > block else 0.0
    own_block = 2.0 * gamma(length * terms) * length * ratio
    return Rounding(length, own_block, _TWO_ROUNDINGS * above)


def sum_in_blocks(
    block_sum: Callable[..., jax.Array], *terms: jax.Array, block: int = BLOCK_LENGTH
) -> jax.Array:
    """Sums over the leading axis: each block with `block_sum`, then their results.

    Small results are added in pairs. Large ones are added to a total in a loop over blocks, which
    needs memory for one of them.

    Args:
      block_sum: maps arrays (b, …) to the sum over the first axis; rows of zeros add nothing.
      terms: arrays (B, …).
      block: the maximum number of examples in a block.
    """
    size = terms[0].shape[0]
    if size <= block:
        return block_sum(*terms)
    # The batch is padded if no length down to a quarter of `block` divides it.
    lengths = (n for n in range(block, block // 4 - 1, -1) if size % n == 0)
    length = next(lengths, block)

    def cut(x: jax.Array) -> jax.Array:
        if size % length:
            x = jnp.pad(x, [(0, -size % length)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, length, *x.shape[1:])

    blocks = [cut(x) for x in terms]
    count = blocks[0].shape[0]
    result = jax.eval_shape(block_sum, *(x[0] for x in blocks))
    if count * result.size <= _CACHED_ENTRIES:
        return _sum_in_pairs(jax.vmap(block_sum)(*blocks))
    zeros = jnp.zeros(result.shape, result.dtype)
    if count <= _PLAIN_SUMS:
        total, _ = lax.scan(lambda total, each: (total + block_sum(*each), None), zeros, blocks)
        return total
    (total, lost), _ = lax.scan(
        lambda sums, each: (compensated_add(*sums, block_sum(*each)), None), (zeros, zeros), blocks
    )
    return total + lost


def _sum_in_pairs(x: jax.Array) -> jax.Array:
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        sums = x[:half] + x[half : 2 * half]
        # Without the barrier, the compiler would recompute all lower levels for each entry.
        x = lax.optimization_barrier(jnp.concatenate([sums, x[2 * half :]]))
    return x[0]


def sum_weighted(weights: jax.Array, values: jax.Array, *, block: int = BLOCK_LENGTH) -> jax.Array:
    """Returns Σ_i weights[i] values[i], for (B,) and (B, …), at full precision.

    `block_rounding(B, block)` bounds how one example changes its rounding.
    """

    def block_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum("b,b...->...", weights, values, precision=lax.Precision.HIGHEST)

    return sum_in_blocks(block_sum, weights, values, block=block)


@dataclasses.dataclass(frozen=True)
class IntegerSteps:
    """Represents numbers as integers, whose sums are exact in any order.

    A number is rounded to multiples of a step g = 2^-exponent. The remainder is rounded to
    multiples of the fine step 2^-finer g. Partial sums of whole steps may overflow, because
    integers wrap around and the total is in range. Sums of fine steps do not overflow.

    Attributes:
      exponent: chosen so that totals and summands are at most 2³⁰ steps (2⁶² in float64).
      finer: 30 − ⌈log₂ N⌉ for N numbers that are added to an entry.
    """

    exponent: int
    finer: int

    def split(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns whole and fine steps of values in float32 or float64."""
        kind = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
        # The difference below must be exact. XLA could fuse a product with it, and the difference
        # would include the rounding of `values`. `ldexp` is not a product.
        scaled = ldexp(values, jnp.int32(self.exponent))
        whole = jnp.round(scaled)
        return whole.astype(kind), jnp.round((scaled - whole) * 2.0**self.finer).astype(kind)

    def join(self, whole: jax.Array, fine: jax.Array) -> jax.Array:
        """Returns the sums of whole and fine steps as numbers, rounded once."""
        kind = jnp.float64 if whole.dtype == jnp.int64 else jnp.float32
        # Carry whole steps out of the fine ones; the shift rounds down, so the rest is positive.
        whole, fine = whole + (fine >> self.finer), fine & (2**self.finer - 1)
        high = (whole >> 12) << 12  # a float holds both parts exactly
        low = (whole - high).astype(kind) + fine.astype(kind) * 2.0**-self.finer
        return (high.astype(kind) + low) * 2.0**-self.exponent


def make_steps(largest: float, count: int, *, bits: int = 30) -> IntegerSteps:
    """Returns steps for sums of `count` numbers per entry.

    Each number and each total is at most `largest`.

    Raises:
      ValueError: the step is outside the range of float32.
    """
    # The largest total must fit into 2^bits whole steps.
    exponent = bits - math.ceil(math.log2(largest))
    if abs(exponent) > 126:
        raise ValueError(
            f"The largest sum must be between 1e-29 and 1e47, got {largest:g}. Scale the loss and "
            "the clipping bound by the same factor."
        )
    return IntegerSteps(exponent, _fine_bits(count, bits))


def _fine_bits(count: int, bits: int = 30) -> int:
    """Returns the bits of fine steps, so that sums of `count` remainders fit."""
    return max(0, bits - math.ceil(math.log2(count or 1)))


def step_rounding(count: int, rows: int, columns: int, largest: float, examples: float) -> Rounding:
    """Bounds how one example changes the rounding of a sum by `make_steps`.

    The change is at most half a fine step for each number that the example adds, plus the rounding
    of the conversion back to floats. The latter rounds the fine steps below a whole one, the 2¹²
    whole steps below the high part, and the total. Steps are relative to C, but τ is relative to
    C/(1 + τ), with τ ≤ 1/2: hence the factor 1.5.

    Args:
      count: how many numbers all examples together add to an entry.
      rows: L, how many numbers an example adds, possibly all to one entry.
      columns: the entries of a row.
      largest: as for `make_steps`.
      examples: an upper bound of the sum, relative to C.
    """
    # A step is at most twice as long as necessary.
    step = 2.0**-29 * largest
    fine = step * 2.0 ** -_fine_bits(count)
    added = 0.5 * fine * rows * math.sqrt(columns)
    low = _TWO_ROUNDINGS * 2**12 * step * math.sqrt(rows * columns)
    return Rounding(joined=_TWO_ROUNDINGS * examples, own=1.5 * (added + low))


def sum_lookups(
    lookups: Sequence[tuple[jax.Array, jax.Array]],
    size: int,
    *,
    terms: int,
    examples: int,
    bound: float,
    ratio: float,
    largest_summand: float,
) -> jax.Array:
    """Adds the values of all lookups to the rows of a table (size, D) of zeros.

    A scatter adds one value after the other. If one example could change its rounding too much,
    values are added as `IntegerSteps` instead. `lookup_rounding` bounds the change.

    Args:
      lookups: rows (N,), integers, and values (N, D). No value is above `ratio` · `bound`.
      size: the number of rows.
      terms: L, the lookups of one example.
      examples: B, the number of examples in all micro-batches and devices.
      bound: C.
      ratio: M, such that f S ≤ M C.
      largest_summand: an upper bound of the amount that all lookups of one example add to an entry,
        relative to C.

    Raises:
      ValueError: the step for `bound` is outside the range of float32.
    """
    wide = float32_at_least(*(values for _, values in lookups))
    table: jax.Array = jnp.zeros((size, lookups[0][1].shape[-1]), wide)
    count = terms * examples
    if _scatter_rounding(terms, examples, ratio) is not None:
        for rows, values in lookups:
            table = table.at[rows].add(values.astype(wide))
        return table
    bits = 62 if wide == jnp.float64 else 30
    exact = make_steps(max(examples * largest_summand, ratio) * bound, count, bits=bits)
    rows = jnp.concatenate([rows for rows, _ in lookups])
    steps = exact.split(jnp.concatenate([values.astype(wide) for _, values in lookups]))

    def total(rows: jax.Array, steps: jax.Array, size: int) -> jax.Array:
        return jnp.zeros((size, steps.shape[1]), steps.dtype).at[rows].add(steps)

    if rows.shape[0] >= size:
        return exact.join(*(total(rows, x, size) for x in steps))
    # Only the rows that occur are summed, since two more tables would need more memory.
    order, found, slots = _join_equal(rows, size)
    sums = exact.join(*(total(slots, x[order], len(found)) for x in steps))
    return table.at[found].set(sums, mode="drop", unique_indices=True)


def _join_equal(rows: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns an order that sorts rows (N,), the distinct rows, and the slots.

    Slots are the places of the sorted rows among the distinct ones. The distinct rows are padded to
    N with rows beyond the table.
    """
    rows = jnp.where(rows < 0, rows + size, rows).astype(jnp.int32)
    order = jnp.argsort(rows)
    ordered = rows[order]
    slots = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]]))
    beyond = size + jnp.arange(len(rows), dtype=jnp.int32)
    return order, beyond.at[slots].set(ordered), slots


def lookup_rounding(
    columns: int, *, terms: int, examples: int, ratio: float, largest_summand: float
) -> Rounding:
    """Bounds how one example changes the rounding of `sum_lookups`."""
    rounding = _scatter_rounding(terms, examples, ratio)
    if rounding is None:
        total = examples * largest_summand
        largest = max(total, ratio)
        rounding = step_rounding(terms * examples, terms, columns, largest, total)
    return rounding


def _scatter_rounding(terms: int, examples: int, ratio: float) -> Rounding | None:
    """Bounds how one example changes a scatter; `None` if it changes too much."""
    if terms * examples * UNIT_ROUNDOFF >= 0.5:
        return None
    # A scatter is one block with all examples in it.
    change = block_rounding(examples, examples, terms=terms, ratio=ratio).blocks
    return Rounding(joined=change, termwise=True) if change <= ROUNDING_LIMIT else None


def two_sum(total: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of two float arrays and its exact rounding error.

    Source: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    """
    found = total + value
    other = found - total
    return found, (total - (found - other)) + (value - other)


def compensated_add(
    total: jax.Array, lost: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds a value to a total, and returns it with the error of all roundings so far.

    The error is added back as soon as it affects the total, so it stays below the last place of the
    total. If it accumulated, its own rounding would grow as K² for K values.
    """
    total, off = two_sum(total, value)
    return two_sum(total, lost + off)
