"""Sums over examples, and bounds how one example changes the rounding of the sum.

An example changes a sum by its own summand, and by changing the rounding of all terms added after
it. If B terms are added one after the other, an adversary can choose them so that each is rounded
the other way. Here, blocks of b examples are summed first, and then their results in levels of
short sums. An example then changes the rounding only in its own block and in one sum on each level
above. The change is bounded for any data and any order within a sum. Let S_i be the absolute size
of the summand of example i, with f_i S_i ≤ M C. The error of the sum of a block with k terms is at
most γ_k Σ_i f_i S_i ≤ γ_k b M C.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._rounding.bounds import UNIT_ROUNDOFF, gamma
from dpoptax._support.tree import widen

BLOCK_LENGTH = 32
"""The maximum number of examples in a block, if each has one term."""

ROUNDING_LIMIT = 2.0**-7
"""How much one example may change the rounding of a part of a sum, relative to C.

Blocks are short enough to stay within this limit. Sums that could exceed it use integers.
"""

FLOAT_TOTALS = 8
"""The number of micro-batches or devices up to which totals are added as floats."""

TWO_ROUNDINGS = 2.02 * UNIT_ROUNDOFF
"""How much a sum may change because it is rounded once with an example and once without it.

It is relative to the rounded sum.
"""

# A block has at least this many products. Blocks become longer if their results would have more
# than `_CACHED_ENTRIES` entries, so that the results stay in a cache.
_MINIMUM_PRODUCTS = 128
_CACHED_ENTRIES = 2**16
# The entries of the results that a GPU stores at once. It would otherwise start the kernels of a
# block again for each block.
_GPU_ENTRIES = 2**25
# A level above the blocks sums up to this many results at once, if this changes less than
# `_LEVEL_LIMIT`, relative to C, and otherwise two. A loop carries rounding errors along beyond the
# same limit, and beyond `_PLAIN_SUMS` blocks.
_LEVEL_LENGTH = 64
_LEVEL_LIMIT = 2.0**-9
_PLAIN_SUMS = 5
# Room for numbers that are set to zero in sums of formed gradients, which are less than 2^-125 B √d
# in sums and 2^-126 √d in summands: relative to the smallest bound, for d up to 2^40.
_FLUSHED = 2.0**-40


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
    join = (lambda *changes: math.fsum(changes)) if shared else math.hypot
    every = list(roundings)
    # In increasing order, so that each key keeps its largest change.
    blocks = dict(sorted((each.length, each.blocks) for each in every))
    joined = dict(sorted((each.termwise, each.joined) for each in every))
    own = math.fsum(each.own for each in every)
    return join(*blocks.values()) + join(*joined.values()) + own


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
    formed = dataclasses.replace(block_rounding(whole.examples, BLOCK_LENGTH), own=_FLUSHED)
    return combine_roundings([*roundings, formed], shared=shared) + layout_rounding(whole)


def uses_integer_totals(whole: WholeBatch) -> bool:
    """Returns whether the totals of devices are added as integers."""
    return (
        whole.devices > FLOAT_TOTALS
        and _device_rounding(whole.devices, whole.examples) > 2.0 * ROUNDING_LIMIT
    )


def _device_rounding(devices: int, examples: int) -> float:
    return TWO_ROUNDINGS * (devices + 1) / 2 * examples


def parts_rounding(parts: int, examples: int) -> float:
    """Returns τ of adding this many totals of all examples, one after the other."""
    return TWO_ROUNDINGS * (parts - 1) * examples


def block_length(examples: int, products: int, entries: int, ratio: float) -> int:
    """Returns the number of examples in a block.

    Args:
      examples: B.
      products: the products that each entry of an example's summand adds up.
      entries: the number of entries of the sum.
      ratio: M, such that f S ≤ M C.
    """
    # The longest block within the limit, since `block_rounding` is about 2 u b² L M: each of b L
    # additions errs by u, relative to the block's b summands of at most M C, with an example and
    # without it.
    most = math.isqrt(int(ROUNDING_LIMIT / (2.0 * UNIT_ROUNDOFF * products * ratio)))
    least = max(-(-_MINIMUM_PRODUCTS // products), -(-examples * entries // _CACHED_ENTRIES))
    return max(1, min(most, least))


def block_rounding(
    examples: int,
    block: int,
    *,
    products: int = 1,
    ratio: float = 1.0,
    largest_summand: float = 1.0,
) -> Rounding:
    """Bounds how one example changes the rounding of `sum_in_blocks`.

    The bound also holds for several sums together, if they share no coordinate.

    Args:
      examples: B.
      block: b, the maximum number of examples in a block.
      products: the products that each entry of an example's summand adds up.
      ratio: M, such that f S ≤ M C.
      largest_summand: an upper bound of an example's summand, relative to C.
    """
    length = min(block, examples)
    own_block = 2.0 * gamma(length * products) * length * ratio
    return Rounding(length, own_block, _rounding_above(examples, block, largest_summand))


@functools.cache
def _rounding_above(examples: int, block: int, largest_summand: float) -> float:
    """Bounds how one example changes the rounding of the sums of blocks.

    It holds for all orders of `sum_in_blocks`, and for parts of the examples.

    - In levels: a level adds n results of k examples each, in any order. The sum is off by at most
      γ_(n - 1) n k, with the example and without it.
    - In a loop over n blocks, the sums have 2, 3, …, n blocks, together (n + 1)/2 · B − B/n
      examples, or 2.8 B for n = 5. If rounding errors are carried along, only the last sum counts,
      with B. The carried errors lose at most 4 n u² B, with the example and without it, which is
      less than 4 u B for n ≤ 2^24.
    - In chunks on a GPU, each in levels, and in turn with the errors, so that only the last sum
      counts. Chunks are equally long and at least two, so they have at most 2/3 B: two blocks of
      three.
    """
    if examples <= block:
        return 0.0
    one_sum = TWO_ROUNDINGS * examples * largest_summand
    lengths = range(max(1, block // 4), block + 1)
    levels, in_chunk = (
        max(_levels_rounding(n, length, block, largest_summand) for length in lengths)
        for n in (examples, -(-2 * examples // 3))
    )
    loop = _loop_rounding(-(-examples // lengths[0]), examples, largest_summand)
    # 2.8 is (n + 1)/2 - 1/n for n = `_PLAIN_SUMS`. Longer loops stay within the limit, or carry
    # their rounding errors along.
    turns = max(min(loop, _LEVEL_LIMIT), 2.8 * one_sum)
    return max(levels, in_chunk + one_sum, turns)


def _levels_rounding(examples: int, length: int, block: int, largest_summand: float) -> float:
    """Bounds the change of sums in levels, if blocks have `length` examples."""
    count, total = -(-examples // length), 0.0
    for longest in _level_lengths(block, largest_summand):
        if count <= 1:
            return total
        length = min(examples, length * longest)
        total += TWO_ROUNDINGS * (min(count, longest) - 1) * length * largest_summand
        count = -(-count // longest)
    raise AssertionError  # levels never end


def _level_lengths(block: int, largest_summand: float) -> Iterator[int]:
    """Yields the largest number of results that each level adds at once."""
    examples = block
    while True:
        most = _LEVEL_LIMIT / (TWO_ROUNDINGS * examples * largest_summand)
        longest = max(2, min(_LEVEL_LENGTH, math.isqrt(int(most))))
        yield longest
        examples *= longest


def _loop_rounding(count: int, examples: int, largest_summand: float) -> float:
    """Bounds the change of a sum of `count` results, one after the other."""
    return TWO_ROUNDINGS * (count + 1) / 2 * examples * largest_summand


def sum_in_blocks(
    block_sum: Callable[..., jax.Array],
    *terms: jax.Array,
    block: int = BLOCK_LENGTH,
    largest_summand: float = 1.0,
) -> jax.Array:
    """Sums over the leading axis: each block with `block_sum`, then their results.

    Small results are added in levels. Large ones are added to a total in a loop over blocks, which
    needs memory for one of them. A GPU adds chunks of them in levels.

    Args:
      block_sum: maps arrays (b, …) to the sum over the first axis; rows of zeros add nothing.
      terms: arrays (B, …).
      block: the maximum number of examples in a block.
      largest_summand: as for `block_rounding`.
    """
    size = terms[0].shape[0]
    if size <= block:
        return block_sum(*terms)
    # The batch is padded if no length down to a quarter of `block` divides it.
    lengths = (n for n in range(block, block // 4 - 1, -1) if size % n == 0)
    length = next(lengths, block)

    blocks = [_cut(x, length) for x in terms]
    count = blocks[0].shape[0]
    result = jax.eval_shape(block_sum, *(x[0] for x in blocks))
    lengths_of_levels = functools.partial(_level_lengths, block, largest_summand)

    def in_levels(*blocks: jax.Array) -> jax.Array:
        return _sum_in_levels(jax.vmap(block_sum)(*blocks), lengths_of_levels())

    if count * result.size <= _CACHED_ENTRIES:
        return in_levels(*blocks)
    zeros = jnp.zeros(result.shape, result.dtype)
    plain = _loop_rounding(count, size, largest_summand) <= _LEVEL_LIMIT or count <= _PLAIN_SUMS
    in_chunks = functools.partial(_sum_in_chunks, in_levels, zeros)
    in_turn = functools.partial(_sum_in_turn, block_sum, zeros, plain)
    found: jax.Array = lax.platform_dependent(
        *blocks, cuda=in_chunks, rocm=in_chunks, default=in_turn
    )
    return found


def _cut(x: jax.Array, length: int) -> jax.Array:
    """Cuts the leading axis into parts of a length, the last one padded with zeros."""
    if x.shape[0] % length:
        x = jnp.pad(x, [(0, -x.shape[0] % length)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(x.shape[0] // length, length, *x.shape[1:])


def _sum_in_chunks(
    chunk_sum: Callable[..., jax.Array], zeros: jax.Array, *blocks: jax.Array
) -> jax.Array:
    """Adds the blocks of a chunk with `chunk_sum`, and the chunks in turn."""
    count = blocks[0].shape[0]
    length = _chunk_length(count, zeros.size)
    if length == count:
        return chunk_sum(*blocks)
    return _sum_in_turn(chunk_sum, zeros, False, *(_cut(x, length) for x in blocks))


def _chunk_length(count: int, entries: int) -> int:
    """Returns the number of blocks in each of the fewest chunks that a GPU can store."""
    chunks = -(-count // max(1, _GPU_ENTRIES // entries))
    return -(-count // chunks)


def _sum_in_turn(
    block_sum: Callable[..., jax.Array], zeros: jax.Array, plain: bool, *blocks: jax.Array
) -> jax.Array:
    """Adds each block to a total; unless `plain`, more than two with the rounding errors."""
    count = blocks[0].shape[0]
    # Two blocks need no compensation: the only addition rounds once.
    if count == 2:  # a loop would read and write the total twice
        return block_sum(*(x[0] for x in blocks)) + block_sum(*(x[1] for x in blocks))
    if plain:
        total, _ = lax.scan(lambda total, each: (total + block_sum(*each), None), zeros, blocks)
        return total
    total, _ = lax.scan(
        lambda total, each: (compensated_add(total, block_sum(*each)), None),
        lax.complex(zeros, zeros),
        blocks,
    )
    return total.real


def _sum_in_levels(x: jax.Array, lengths: Iterator[int]) -> jax.Array:
    """Sums over the leading axis, at most so many rows at once on each level."""
    while (count := x.shape[0]) > 1:
        sums = -(-count // next(lengths))
        # Without the barrier, the compiler would join levels.
        x = lax.optimization_barrier(jnp.sum(_cut(x, -(-count // sums)), axis=1))
    return x[0]


def sum_weighted(
    weights: jax.Array,
    values: jax.Array,
    *,
    block: int = BLOCK_LENGTH,
    largest_summand: float = 1.0,
) -> jax.Array:
    """Returns Σ_i weights[i] values[i], for (B,) and (B, …), at full precision.

    `block_rounding(B, block)` bounds how one example changes its rounding.
    """

    def block_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
        # Widened, since it is not defined how precise products of two dtypes are.
        return jnp.einsum("b,b...->...", weights, widen(values), precision=lax.Precision.HIGHEST)

    return sum_in_blocks(block_sum, weights, values, block=block, largest_summand=largest_summand)


def two_sum(total: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of two float arrays and its exact rounding error.

    Source: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    """
    found = total + value
    other = found - total
    return found, (total - (found - other)) + (value - other)


def compensated_add(total: jax.Array, value: jax.Array) -> jax.Array:
    """Adds a value to the real part of a total, whose imaginary part is the error of all roundings.

    The error is added back as soon as it affects the total, so it stays below half the last place
    of the total, and adding it once more would change nothing. If it accumulated, its own rounding
    would grow as K² for K values. XLA's CPU backend updates one complex array in one kernel that
    works in place, and took four kernels for two arrays.
    """
    found, off = two_sum(total.real, value)
    return lax.complex(*two_sum(found, total.imag + off))
