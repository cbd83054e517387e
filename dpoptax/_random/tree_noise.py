"""Draws the noise of a pytree, each number once, with few kernels, which compile fast."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpoptax._random import box_muller
from dpoptax._random.keys import check_threefry_key, fold_in
from dpoptax._support.tree import PyTree, float32_at_least
from dpoptax._support.xla import (
    materialize,
    on_each_device,
    once,
    opaque_integers,
    out_sharding,
    unstack,
)

# Leaves with at most this many numbers are drawn together, as one vector. For larger ones, the
# vector costs an extra pass through memory. Measured by hand on one x86 CPU.
_MAX_SIZE_TOGETHER = 2**18


class Noise(NamedTuple):
    """Holds functions that draw noise.

    Attributes:
      of: maps a key, an array and its number to noise of the array's shape and sharding.
      vector: maps a key, a size and a number to a vector of noise, float32 or integers.
    """

    of: Callable[[jax.Array, jax.Array, jax.Array | int], jax.Array]
    vector: Callable[[jax.Array, int, int], jax.Array]


Noisy: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""Maps a leaf and its noise to the released leaf, elementwise."""


def standard_normal(
    key: jax.Array,
    shape: Sequence[int],
    dtype: DTypeLike,
    *,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """Draws N(0, I): float32 with `box_muller`, float64 with `jax.random.normal`.

    JAX draws a float32 normal from 23 bits, so its tails have gaps that affect δ. It draws a
    float64 normal from 52 bits.
    """
    if np.dtype(dtype) == np.float32:
        return box_muller.normal(key, shape, out_sharding=out_sharding)
    return jax.random.normal(check_threefry_key(key), shape, dtype, out_sharding=out_sharding)


def add_noise(tree: PyTree, stddev: float | jax.Array, key: jax.Array) -> PyTree:
    """Returns tree + stddev · N(0, I).

    If `stddev` is the float 0, nothing is drawn.
    """
    if isinstance(stddev, float) and stddev == 0.0:
        return tree

    def of(key: jax.Array, leaf: jax.Array, number: jax.Array | int) -> jax.Array:
        dtype, sharding = float32_at_least(leaf), out_sharding(leaf)
        if dtype == jnp.float32:
            return box_muller.normal(key, leaf.shape, leaf=number, out_sharding=sharding)
        # JAX draws with the counters that `fold_in` hashes. So `key` itself draws no leaf, or this
        # noise would contain the keys of others.
        return standard_normal(fold_in(key, number), leaf.shape, dtype, out_sharding=sharding)

    def noisy(leaf: jax.Array, noise: jax.Array) -> jax.Array:
        # A Python float does not change the dtype of the noise.
        scale = stddev if isinstance(stddev, float) else stddev.astype(noise.dtype)
        return leaf + scale * noise

    return each_leaf(tree, key, Noise(of, box_muller.normal_vector), noisy)


def each_leaf(tree: PyTree, key: jax.Array, noise: Noise, noisy: Noisy) -> PyTree:
    """Returns the tree of noisy(leaf, noise of the leaf).

    Each large leaf is drawn with its number. All small leaves are parts of one vector, in the order
    of their shapes, which is drawn with the number of the first of them. So the bits depend only on
    the key and on the shapes and dtypes of the tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    small = _by_shape([i for i, leaf in enumerate(leaves) if _is_small(leaf)], leaves)
    large = [i for i, leaf in enumerate(leaves) if not _is_small(leaf)]
    traced = isinstance(key, jax.core.Tracer)

    def draw() -> list[jax.Array]:
        # With constant numbers, XLA's CPU would compile each leaf of a shape.
        numbers: Sequence[jax.Array | int] = opaque_integers(large) if traced else large
        return [
            noisy(leaves[i], noise.of(key, leaves[i], n))
            for i, n in zip(large, numbers, strict=True)
        ]

    found = dict(zip(large, once(draw, key) if large else (), strict=True))
    if small:
        shapes = [leaves[i].shape for i in small]

        def draw_parts(key: jax.Array) -> list[jax.Array]:
            vector = noise.vector(key, sum(map(math.prod, shapes)), small[0])
            return _cut(materialize(vector, jnp.number), shapes)

        draw_all = on_each_device(draw_parts, leaves) if traced else draw_parts
        for i, part in zip(small, draw_all(key), strict=True):
            found[i] = noisy(leaves[i], _placed(part, leaves[i]))
    return jax.tree.unflatten(treedef, [found[i] for i in range(len(leaves))])


def _by_shape(numbers: list[int], leaves: Sequence[jax.Array]) -> list[int]:
    """Returns the numbers of leaves, with those of the same shape side by side."""
    shapes = [leaves[i].shape for i in numbers]
    return sorted(numbers, key=lambda i: shapes.index(leaves[i].shape))


def _is_small(leaf: jax.Array) -> bool:
    return leaf.size <= _MAX_SIZE_TOGETHER and float32_at_least(leaf) == jnp.float32


def _cut(vector: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Returns consecutive parts of a vector, of the given shapes."""
    stacks, start = [], 0
    # One kernel serves all leaves of a shape, if they are slices of one stack.
    for shape, group in itertools.groupby(shapes):
        count = len(list(group))
        end = start + count * math.prod(shape)
        stacks.append(vector[start:end].reshape(count, *shape))
        start = end
    return list(itertools.chain.from_iterable(unstack(*stacks)))


def _placed(part: jax.Array, leaf: jax.Array) -> jax.Array:
    sharding = out_sharding(leaf)
    return part if sharding is None else jax.sharding.reshard(part, sharding)
