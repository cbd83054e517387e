"""Draws the noise of many leaves with few kernels, which compile faster."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._release.random.keys import split
from dpoptax._release.random.row_matrix import RowMatrix, fits
from dpoptax._support.tree import float32_at_least
from dpoptax._support.xla import (
    groups_to_stack,
    is_for_one_device,
    materialize,
    once,
    unstack,
)

if TYPE_CHECKING:
    from dpoptax._release.random.tree_noise import Noise, Noisy


def draw_groups(
    leaves: list[jax.Array], key: jax.Array, noise: "Noise", noisy: "Noisy"
) -> list[jax.Array]:
    """Returns noisy leaves, with the same bits as if each were drawn alone.

    In a program for one device, the noise of all small leaves is drawn as the rows of one matrix.
    """
    in_rows = np.array([_fits_rows(key, leaf, noise) for leaf in leaves], bool)
    results = list(leaves)
    for draw, chosen in ((_draw_rows, in_rows), (_draw_stacks, ~in_rows)):
        numbers = np.flatnonzero(chosen)
        if numbers.size:
            drawn = draw([leaves[i] for i in numbers], key, numbers, noise, noisy)
            for i, leaf in zip(numbers, drawn, strict=True):
                results[i] = leaf
    return results


def _fits_rows(key: jax.Array, leaf: jax.Array, noise: "Noise") -> bool:
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
    noise: "Noise",
    noisy: "Noisy",
) -> list[jax.Array]:
    """Returns noisy leaves. Their noise is drawn as one matrix."""
    rows = RowMatrix([leaf.shape for leaf in leaves], noise.halves)
    matrix = materialize(noise.in_rows(split(key, numbers), rows), jnp.number)
    return list(map(noisy, leaves, rows.unpacked(matrix)))


def _draw_stacks(
    leaves: list[jax.Array],
    key: jax.Array,
    numbers: np.ndarray,
    noise: "Noise",
    noisy: "Noisy",
) -> list[jax.Array]:
    """Returns noisy leaves. Noise for leaves of the same shape is drawn in a loop."""
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
