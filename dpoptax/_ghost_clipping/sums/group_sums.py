"""Sums the gradients of many large matrices, one after the other.

On TPU, a product of all groups takes longer to compile, and its operands are copied.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._losses.rules import Sizes

# The largest part of the sum of a group.
_PART_ENTRIES = 2**19


def sum_by_group(weighted: Segment, sizes: Sizes, in_blocks: Callable[..., jax.Array]) -> jax.Array:
    """Returns the sum of a weighted segment, computed one group after the other.

    `in_blocks` is `sum_in_blocks` with its options.
    """
    block_sum = functools.partial(factor_products.contract, "bktr,bktd->krd")

    def sum_group(segments: list[Segment]) -> jax.Array:
        (rows, columns), length = segments[0], sizes[1] // _row_parts(sizes)

        def sum_part(start: jax.Array) -> jax.Array:
            part = lax.dynamic_slice_in_dim(rows, start, length, axis=3)
            return in_blocks(block_sum, part, columns)

        return lax.map(sum_part, jnp.arange(0, sizes[1], length)).reshape(sizes[1:])

    found: jax.Array = factor_products.map_groups(sum_group, [weighted])
    return found


def _row_parts(sizes: Sizes) -> int:
    """Returns the number of parts that the rows of a group are summed in.

    A TPU's sum that fits into vector memory is compiled as one unrolled kernel. A quarter of it
    compiles in a quarter of the time. Parts are aligned with tiles of 128 entries.
    """
    _, rows, columns = sizes
    lengths = [n for n in range(128, rows, 128) if rows % n == 0 and n * columns <= _PART_ENTRIES]
    return rows // max(lengths, default=rows)
