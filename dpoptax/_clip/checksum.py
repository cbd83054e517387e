"""Computes the checksum that seals a clipped sum."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._clip.clip import Clip
from dpoptax._tree import PyTree
from dpoptax._xla import groups_to_stack, is_for_one_device, out_sharding

# Bits of the golden ratio, and multipliers of the hash "lowbias32" (C. Wellons, 2018).
_POSITION, _MIX = 0x9E3779B9, (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))
# Entries per block, and the smallest size for a loop over blocks.
_BLOCK, _LARGE = 2**14, 2**16


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
    labels = [
        zlib.crc32(f"{i} {leaf.dtype}{leaf.shape}".encode(), salt) for i, leaf in enumerate(leaves)
    ]
    found = jnp.uint32((salt + sum(labels)) & 0xFFFFFFFF)
    for indices in groups_to_stack(leaves):
        stack = jnp.stack([leaves[i] for i in indices])
        label = np.array([labels[i] for i in indices], np.uint32)
        for j, words in enumerate(_words(stack)):
            found += _sum_of_mixed(words, label + np.uint32(j * 0x85EBCA6B & 0xFFFFFFFF))
    return found


def _sum_of_mixed(words: jax.Array, labels: np.ndarray) -> jax.Array:
    """Returns Σ mixed(word ^ (place + label)) over a stack of arrays with labels."""

    def at_once(words: jax.Array) -> jax.Array:
        label = labels.reshape(-1, *(1,) * (words.ndim - 1))
        return jnp.sum(mixed(words ^ (_places(words) + label)), dtype=jnp.uint32)

    def by_blocks(words: jax.Array) -> jax.Array:
        # XLA:CPU reduces to a scalar without vector instructions. A block-wide accumulator is
        # twenty times faster.
        flat, whole = words.reshape(-1), words.size // _BLOCK
        within = lax.iota(jnp.uint32, _BLOCK) * np.uint32(_POSITION) + labels[0]

        def add(i: jax.Array, sums: jax.Array) -> jax.Array:
            first = i.astype(jnp.uint32) * np.uint32(_BLOCK * _POSITION & 0xFFFFFFFF)
            block = lax.dynamic_slice(flat, (i * _BLOCK,), (_BLOCK,))
            return sums + mixed(block ^ (within + first))

        sums = lax.fori_loop(0, whole, add, jnp.zeros(_BLOCK, jnp.uint32))
        rest = jnp.arange(whole * _BLOCK, words.size, dtype=jnp.uint32) * np.uint32(_POSITION)
        rest = mixed(flat[whole * _BLOCK :] ^ (rest + labels[0]))
        return jnp.sum(sums, dtype=jnp.uint32) + jnp.sum(rest, dtype=jnp.uint32)

    # Blocks of a sharded array would be gathered on each device.
    if len(labels) > 1 or words.size < _LARGE or not is_for_one_device(words):
        return at_once(words)
    found: jax.Array = lax.platform_dependent(words, cpu=by_blocks, default=at_once)
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
    bits = x.dtype.itemsize * 8
    unsigned = lax.bitcast_convert_type(x, jnp.dtype(f"uint{bits}"))
    if bits == 64:
        return [(unsigned & 0xFFFFFFFF).astype(jnp.uint32), (unsigned >> 32).astype(jnp.uint32)]
    return [unsigned.astype(jnp.uint32)]


def _places(x: jax.Array) -> jax.Array:
    """Returns a number for each entry by its row-major place, sharded like the array."""
    places = jnp.uint32(0)
    for axis, size in enumerate(x.shape):
        if size > 1:
            stride = math.prod(x.shape[axis + 1 :])
            along = lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=out_sharding(x))
            places += along * np.uint32(stride * _POSITION & 0xFFFFFFFF)
    return places
