"""The checksum under which a clipped sum goes to the noise: a number that any change breaks."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax._clip.clip import Clip
from dpoptax._tree import PyTree
from dpoptax._xla import groups_to_stack, out_sharding

# The golden ratio's bits, and the multipliers of the hash "lowbias32" (C. Wellons, 2018).
_POSITION, _MIX = 0x9E3779B9, (np.uint32(0x7FEB352D), np.uint32(0x846CA68B))


def checksum(
    total: PyTree,
    clip: Clip,
    public: PyTree,
    grid: float | None = None,
    examples: int | None = None,
) -> jax.Array:
    """A uint32 that depends on every bit of the arrays, their places, and what is said of them.

    One entry of another value, or entries or leaves that change places, give another checksum; of
    changes to more entries at random one in 2³² does not show. It guards against mistakes, not
    against who computes a matching one. Integers add up to the same in any order: it is equal
    however the arrays are split over devices.
    """
    kind = type(clip)
    salt = zlib.crc32(f"{kind.__module__}.{clip!r} {grid} {examples}".encode())
    sums = of_leaves(total, salt)
    return mixed(sums ^ of_leaves(public, ~salt & 0xFFFFFFFF))


def of_leaves(tree: PyTree, salt: int) -> jax.Array:
    """A uint32 that depends on every bit of a tree's arrays, on their places and on `salt`."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    labels = [
        zlib.crc32(f"{i} {leaf.dtype}{leaf.shape}".encode(), salt) for i, leaf in enumerate(leaves)
    ]
    found = jnp.uint32((salt + sum(labels)) & 0xFFFFFFFF)
    for indices in groups_to_stack(leaves):
        stack = jnp.stack([leaves[i] for i in indices])
        label = np.array([labels[i] for i in indices], np.uint32)
        label = label.reshape(-1, *(1,) * (stack.ndim - 1))
        for j, words in enumerate(_words(stack)):
            place = _places(stack) + (label + np.uint32(j * 0x85EBCA6B & 0xFFFFFFFF))
            found += jnp.sum(mixed(words ^ place), dtype=jnp.uint32)
    return found


def mixed(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits under which sums of differences do not cancel, signs included."""
    x = (x ^ (x >> np.uint32(16))) * _MIX[0]
    x = (x ^ (x >> np.uint32(15))) * _MIX[1]
    return x ^ (x >> np.uint32(16))


def _words(x: jax.Array) -> list[jax.Array]:
    """The bits of an array as uint32 arrays of its shape."""
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
    """A number for each entry, from its place in row-major order, split like the array."""
    places = jnp.uint32(0)
    for axis, size in enumerate(x.shape):
        if size > 1:
            stride = math.prod(x.shape[axis + 1 :])
            along = lax.broadcasted_iota(jnp.uint32, x.shape, axis, out_sharding=out_sharding(x))
            places += along * np.uint32(stride * _POSITION & 0xFFFFFFFF)
    return places
