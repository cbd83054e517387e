"""Computes the checksum that seals a clipped sum."""

import functools
import itertools
import math
import operator
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._gradients.clip.clip import Clip
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import groups_to_stack, is_for_one_device, out_sharding, places

# Bits of the golden ratio, and multipliers of the hash "lowbias32" (C. Wellons, 2018).
_POSITION, _MIX = 0x9E3779B9, (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
# Entries per block, and the largest size of arrays that are joined.
_BLOCK, _SMALL = 2**14, 2**16


def checksum(
    total: PyTree,
    clip: Clip,
    public: PyTree,
    grid: float | None = None,
    examples: int | None = None,
) -> jax.Array:
    """Returns a uint32 checksum of all bits of the arrays, their places, and metadata.

    It changes if the value of one entry changes, or if entries or leaves are exchanged. A random
    change of several entries is missed with a probability of 2⁻³². The checksum guards against
    mistakes, not against an adversary who computes a matching checksum. Sums of integers do not
    depend on the order, so it does not depend on the sharding of the arrays.
    """
    kind = type(clip)
    salt = zlib.crc32(f"{kind.__module__}.{clip!r} {grid} {examples}".encode())
    sums = checksum_leaves(total, salt)
    return mixed(sums ^ checksum_leaves(public, ~salt & 0xFFFFFFFF))


def checksum_leaves(tree: PyTree, salt: int) -> jax.Array:
    """Returns a uint32 that depends on all bits of a tree, their places, and `salt`."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    shapes = repr([(str(leaf.dtype), leaf.shape) for leaf in leaves])
    return _sum_of_mixed(leaves) + np.uint32(zlib.crc32(shapes.encode(), salt))


@jax.jit  # traced once for the clip and the noise stage
def _sum_of_mixed(leaves: list[jax.Array]) -> jax.Array:
    """Returns Σ mixed(word ^ place) over the words of all leaves, each with its own place."""
    leaves = sorted((leaf for leaf in leaves if leaf.size), key=_is_large)
    if not all(map(is_for_one_device, leaves)):
        return _sum_sharded(leaves)
    small = [word.reshape(-1) for leaf in leaves if not _is_large(leaf) for word in _words(leaf)]
    arrays = [jnp.concatenate(small)] if small else []
    arrays += filter(_is_large, leaves)

    sizes = [array.size * max(1, array.dtype.itemsize // 4) for array in arrays]
    starts = [0, *itertools.accumulate(sizes)]

    def total(arrays: list[jax.Array], block: int) -> jax.Array:
        places = np.array(starts[:-1], np.uint64).astype(np.uint32)
        sums = (_sum_words(*each, block) for each in zip(arrays, places, strict=True))
        return functools.reduce(operator.add, sums, jnp.uint32(0))

    # XLA:CPU reduces to a scalar without vector instructions. A block-wide accumulator is twenty
    # times faster.
    found: jax.Array = lax.platform_dependent(
        arrays,
        cpu=functools.partial(total, block=_BLOCK),
        default=functools.partial(total, block=2**32),
    )
    return found


def _sum_sharded(leaves: list[jax.Array]) -> jax.Array:
    """Returns the same sum without blocks, which would be gathered on each device."""
    found = jnp.uint32(0)
    words = [word for leaf in leaves for word in _words(leaf)]
    # The place of the first word of each array, a number below 2³².
    starts = np.cumsum([0, *(word.size for word in words)]).astype(np.uint32)
    for indices in groups_to_stack(words):
        one, stack = words[indices[0]], jnp.stack([words[i] for i in indices])
        first = starts[indices] * np.uint32(_POSITION)
        strides = [math.prod(one.shape[i + 1 :]) * _POSITION % 2**32 for i in range(one.ndim)]
        place = places(one.shape, strides, out_sharding(one))[None]
        place = place + first.reshape(-1, *(1,) * one.ndim)
        found += jnp.sum(mixed(stack ^ place), dtype=jnp.uint32)
    return found


def _is_large(array: jax.Array) -> bool:
    return array.size > _SMALL


@functools.partial(jax.jit, static_argnums=2)  # traced once for each shape
def _sum_words(array: jax.Array, start: jax.Array, block: int) -> jax.Array:
    """Returns the sum of the mixed words of an array; `start` is the place of the first word.

    The words of a block are computed from its entries. Those of all entries would be another array
    of the size of `array`.
    """
    size = array.size
    if size <= block:
        words = _mixed_words(array, places(array.shape), start, size)
        return jnp.sum(words, dtype=jnp.uint32)
    flat = array.reshape(-1)

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        first = jnp.minimum(i * block, size - block)  # the last block may overlap the one before
        within = lax.iota(jnp.uint32, block) + first.astype(jnp.uint32)
        part = lax.dynamic_slice(flat, (first,), (block,))
        found = _mixed_words(part, within, start, size)
        return sums + jnp.where(within >= (i * block).astype(jnp.uint32), found, 0)

    sums = lax.fori_loop(0, -(-size // block), add, jnp.zeros(block, jnp.uint32))
    return jnp.sum(sums, dtype=jnp.uint32)


def _mixed_words(part: jax.Array, within: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Returns the sum of the mixed words of each entry, whose places are `size` apart."""
    found = jnp.zeros(part.shape, jnp.uint32)
    for i, word in enumerate(_words(part)):
        place = within + start + np.uint32(i * size % 2**32)
        found += mixed(word ^ (place * np.uint32(_POSITION)))
    return found


def mixed(x: jax.Array) -> jax.Array:
    """Applies a bijection of 32 bits, so that changes do not cancel in a sum.

    This includes changes of sign.
    """
    x = (x ^ (x >> np.uint32(16))) * _MIX[0]
    x = (x ^ (x >> np.uint32(15))) * _MIX[1]
    return x ^ (x >> np.uint32(16))


def _words(x: jax.Array) -> list[jax.Array]:
    """Returns the bits of an array as uint32 arrays of its shape."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return [*_words(x.real), *_words(x.imag)]
    if x.dtype == jnp.bool_:
        return [x.astype(jnp.uint32)]
    unsigned = lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))
    if x.dtype.itemsize == 8:
        return [(unsigned & 0xFFFFFFFF).astype(jnp.uint32), (unsigned >> 32).astype(jnp.uint32)]
    return [unsigned.astype(jnp.uint32)]
