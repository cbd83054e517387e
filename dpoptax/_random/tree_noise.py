"""Draws the noise of a pytree, each number once, with few kernels, which compile fast."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpoptax._random import box_muller
from dpoptax._random.keys import check_threefry_key, split
from dpoptax._random.row_matrix import HalvesFn, RowMatrix, fits
from dpoptax._support.tree import PyTree, float32_at_least
from dpoptax._support.xla import (
    groups_to_stack,
    is_for_one_device,
    materialize,
    once,
    out_sharding,
    unstack,
)


class Noise(NamedTuple):
    """Holds functions that draw noise for one array, or for rows of several arrays.

    Both draw the same bits.

    Attributes:
      of: maps a key and an array to noise of the array's shape and sharding.
      in_rows: maps one key per array, and arrays cut into rows, to a matrix of noise, float32 or
        integers.
      halves: the pairing of the numbers of an array.
    """

    of: Callable[[jax.Array, jax.Array], jax.Array]
    in_rows: Callable[[jax.Array, RowMatrix], jax.Array]
    halves: HalvesFn


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
    """Returns tree + stddev · N(0, I), with one key per leaf.

    If `stddev` is the float 0, nothing is drawn.
    """
    if isinstance(stddev, float) and stddev == 0.0:
        return tree

    def of(key: jax.Array, leaf: jax.Array) -> jax.Array:
        dtype, sharding = float32_at_least(leaf), out_sharding(leaf)
        return standard_normal(key, leaf.shape, dtype, out_sharding=sharding)

    def noisy(leaf: jax.Array, noise: jax.Array) -> jax.Array:
        # A Python float does not change the dtype of the noise.
        scale = stddev if isinstance(stddev, float) else stddev.astype(noise.dtype)
        return leaf + scale * noise

    return each_leaf(tree, key, Noise(of, box_muller.normal_in_rows, box_muller.halves), noisy)


def each_leaf(tree: PyTree, key: jax.Array, noise: Noise, noisy: Noisy) -> PyTree:
    """Returns the tree of noisy(leaf, noise of the leaf), with one key per leaf.

    In a program for one device, the noise of all small leaves is drawn as the rows of one matrix.
    The bits are the same as if each leaf were drawn alone.
    """
    leaves, treedef = jax.tree.flatten(tree)
    in_rows = np.array([len(leaves) > 1 and _fits_rows(key, x, noise) for x in leaves], bool)
    for draw, chosen in ((_draw_rows, in_rows), (_draw_stacks, ~in_rows)):
        numbers = np.flatnonzero(chosen)
        if numbers.size:
            drawn = draw([leaves[i] for i in numbers], key, numbers, noise, noisy)
            for i, leaf in zip(numbers, drawn, strict=True):
                leaves[i] = leaf
    return jax.tree.unflatten(treedef, leaves)


def _fits_rows(key: jax.Array, leaf: jax.Array, noise: Noise) -> bool:
    # Several devices each draw only their own part of a leaf, but would draw the whole matrix.
    return (
        isinstance(key, jax.core.Tracer)
        and is_for_one_device(leaf)
        and float32_at_least(leaf) == jnp.float32
        and fits(leaf.shape, noise.halves)
    )


def _draw_rows(
    leaves: list[jax.Array],
    key: jax.Array,
    numbers: np.ndarray,
    noise: Noise,
    noisy: Noisy,
) -> list[jax.Array]:
    """Returns noisy leaves. Their noise is drawn as one matrix."""
    rows = RowMatrix([leaf.shape for leaf in leaves], noise.halves)
    matrix = materialize(noise.in_rows(split(key, numbers), rows), jnp.number)
    return list(map(noisy, leaves, rows.unpacked(matrix)))


def _draw_stacks(
    leaves: list[jax.Array],
    key: jax.Array,
    numbers: np.ndarray,
    noise: Noise,
    noisy: Noisy,
) -> list[jax.Array]:
    """Returns noisy leaves. Noise for leaves of the same shape is drawn in a loop.

    Otherwise, a program for several devices would compile the draw of each leaf.
    """
    groups = groups_to_stack(leaves)
    single = [indices[0] for indices in groups if len(indices) == 1]

    def draw() -> list[jax.Array]:
        keys = unstack(split(key, numbers[single]))[0] if single else []
        own = dict(zip(single, keys, strict=True))

        def stack(indices: list[int]) -> jax.Array:
            leaf = leaves[indices[0]]
            if len(indices) == 1:
                return noisy(leaf, noise.of(own[indices[0]], leaf))[None]
            drawn = jax.lax.map(lambda key: noise.of(key, leaf), split(key, numbers[indices]))
            return noisy(jnp.stack([leaves[i] for i in indices]), drawn)

        return list(map(stack, groups))

    results = list(leaves)
    for indices, parts in zip(groups, unstack(*once(draw, key)), strict=True):
        for i, part in zip(indices, parts, strict=True):
            results[i] = part
    return results
