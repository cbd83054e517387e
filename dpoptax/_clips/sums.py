"""Sums over examples in which one example changes the rounding of few others.

What an example moves in a sum is what it adds, and what it changes in the rounding of the terms
behind it. One after the other, B of them can be chosen so that each rounds the other way: in pairs
of blocks of b examples, those of its block alone do, and one addition in each level above.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32
"""The most examples that are summed in one piece."""


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


def weighted(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Σ_i weights[i] values[i], for (B,) and (B, …), at full precision on every platform."""

    def block_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.einsum("b,b...->...", weights, values, precision=lax.Precision.HIGHEST)

    return in_blocks(block_sum, weights, values)


def of_lookups(
    lookups: Sequence[tuple[jax.Array, jax.Array]], size: int, *, examples: int, bound: float
) -> jax.Array:
    """Σ over lookups, of one row each, of what they add to it: a table (size, C).

    Of more examples than a block has, terms are rounded to whole steps g ≤ 2⁻²⁹ B · `bound`, and
    what that takes off them to steps of 2^-k g, and both are added as integers: exactly, in any
    order, so that one example changes nothing in the rounding of others. Whole steps that overflow
    on the way come back: integers add up modulo their range, in which the total is. The fine ones
    do not overflow: for N lookups k = 30 − ⌈log₂ N⌉. (In float64 it is 62, and g ≤ 2⁻⁶¹ B · bound.)

    Args:
      lookups: rows (N,), integers, and values (N, C). No value is above 32 · `bound`.
      size: the number of rows.
      examples: B.
      bound: what one example adds to an entry at most, all of its lookups together.

    Raises:
      ValueError: a `bound` for which the power of two is none of float32's.
    """
    wide = jnp.result_type(jnp.float32, *(values.dtype for _, values in lookups))
    table: jax.Array = jnp.zeros((size, lookups[0][1].shape[-1]), wide)
    if examples <= BLOCK:
        for rows, values in lookups:
            table = table.at[rows].add(values.astype(wide))
        return table
    whole, bits = (jnp.int64, 62) if wide == jnp.float64 else (jnp.int32, 30)
    exponent = bits - math.ceil(math.log2(examples * bound))
    if abs(exponent) > 126:
        raise ValueError(
            f"a clip bound of {bound:g} is too far from 1 for sums over lookups in float32: "
            "scale the loss, and the bound with it"
        )
    finer = max(0, bits - math.ceil(math.log2(sum(rows.size for rows, _ in lookups) or 1)))
    coarse = fine = table.astype(whole)
    for rows, values in lookups:
        scaled = values.astype(wide) * 2.0**exponent
        steps = jnp.round(scaled)
        coarse = coarse.at[rows].add(steps.astype(whole))
        fine = fine.at[rows].add(jnp.round((scaled - steps) * 2.0**finer).astype(whole))
    return (coarse.astype(wide) + fine.astype(wide) * 2.0**-finer) * 2.0**-exponent


def add(total: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of two arrays of floats, and what its rounding took off, exactly.

    Source: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    """
    found = total + value
    other = found - total
    return found, (total - (found - other)) + (value - other)
