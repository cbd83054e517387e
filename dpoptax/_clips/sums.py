"""Sums over examples in which one example changes the rounding of few others.

What an example moves in a sum is what it adds, and what it changes in the rounding of the terms
behind it. One after the other, B of them can be chosen so that each rounds the other way: in pairs
of blocks of b examples, those of its block alone do, and one addition in each level above.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32
"""The most examples that are summed in one piece."""

# Where no length of blocks divides the batch, down to this one, it is padded.
_SHORTEST = 8


def in_blocks(block_sum: Callable[..., jax.Array], *terms: jax.Array) -> jax.Array:
    """Sums over the leading axis by `block_sum` of parts of it, and the results in pairs.

    Args:
      block_sum: of arrays (b, …), the sum over the first axis; rows of zeros add nothing.
      terms: arrays (B, …).
    """
    size = terms[0].shape[0]
    if size <= BLOCK:
        return block_sum(*terms)
    lengths = (n for n in range(BLOCK, _SHORTEST - 1, -1) if size % n == 0)
    length = next(lengths, BLOCK)

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


def add(total: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of two arrays of floats, and what its rounding took off, exactly.

    Source: Knuth, "The Art of Computer Programming", volume 2, 4.2.2, theorem B.
    """
    found = total + value
    other = found - total
    return found, (total - (found - other)) + (value - other)
