"""How noise is drawn: each number once, a leaf at a time, without long compilation."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpoptax._noise import box_muller
from dpoptax._noise.keys import check_threefry_key, split
from dpoptax._trees import PyTree, alike, float32_at_least, out_sharding, unstacked


def standard_normal(
    key: jax.Array,
    shape: Sequence[int],
    dtype: DTypeLike,
    *,
    out_sharding: jax.sharding.NamedSharding | None = None,
) -> jax.Array:
    """N(0, I): float32 by Box and Muller, float64 as JAX makes it, of 52 bits a number.

    A float32 normal of JAX is made of 23 bits, and its tails have gaps that a δ shows.
    """
    if np.dtype(dtype) == np.float32:
        return box_muller.normal(key, shape, out_sharding=out_sharding)
    return jax.random.normal(check_threefry_key(key), shape, dtype, out_sharding=out_sharding)


def add_noise(tree: PyTree, stddev: float | jax.Array, key: jax.Array) -> PyTree:
    """Returns tree + stddev · N(0, I), a key for every leaf; nothing is drawn at a number of 0."""
    if isinstance(stddev, float) and stddev == 0.0:
        return tree

    def noise(key: jax.Array, leaf: jax.Array) -> jax.Array:
        dtype, sharding = float32_at_least(leaf), out_sharding(leaf)
        return standard_normal(key, leaf.shape, dtype, out_sharding=sharding)

    def noisy(leaf: jax.Array, noise: jax.Array) -> jax.Array:
        # A number, and so no type, changes that of the noise.
        scale = stddev if isinstance(stddev, float) else stddev.astype(noise.dtype)
        return leaf + scale * noise

    return each_leaf(tree, key, noise, noisy)


def each_leaf(
    tree: PyTree,
    key: jax.Array,
    noise: Callable[[jax.Array, jax.Array], jax.Array],
    noisy: Callable[[jax.Array, jax.Array], jax.Array],
) -> PyTree:
    """Returns the tree of noisy(leaf, noise(key, leaf)), a key for every leaf.

    Leaves that are alike are drawn in a loop, and made noisy in a stack.
    """
    leaves, treedef = jax.tree.flatten(tree)
    keys = split(key, len(leaves))
    results, groups = list(leaves), alike(leaves)
    alone = [indices[0] for indices in groups if len(indices) == 1]
    own = dict(zip(alone, unstacked(keys[np.array(alone)])[0], strict=True)) if alone else {}
    for indices in groups:
        leaf = leaves[indices[0]]
        if len(indices) == 1:
            results[indices[0]] = noisy(leaf, noise(own[indices[0]], leaf))
            continue
        drawn = jax.lax.map(lambda key, leaf=leaf: noise(key, leaf), keys[np.array(indices)])
        _put(list(jnp.unstack(noisy(_stack(leaves, indices), drawn))), indices, results)
    return jax.tree.unflatten(treedef, results)


def draw_once(draw: Callable[[], PyTree], like: PyTree, count: jax.Array) -> PyTree:
    """Returns `draw()`, noise or noisy sums of the shapes of `like`, drawn once for all readers.

    On CPU, XLA fuses noise into whatever reads it, and where two do, such as the output of a filter
    and its buffer, into each: the draw is made twice and its parts go through memory. It fuses
    nothing across a branch, so here is one. It is always taken, as no count is negative.
    """
    if not isinstance(count, jax.core.Tracer):  # each operation by itself: nothing is fused
        return draw()
    draw = jax.jit(draw)  # traced once for all that follows
    likes, treedef = jax.tree.flatten(like)
    groups = alike(likes)  # every array that leaves the branch takes time to compile

    def stacked(tree: PyTree) -> list[jax.Array]:
        leaves = jax.tree.leaves(tree)
        return [_stack(leaves, indices) for indices in groups]

    def nothing() -> list[jax.Array]:
        zeros = lambda x, drawn: jnp.zeros_like(x, drawn.dtype)  # noqa: E731
        return stacked(jax.tree.map(zeros, like, jax.eval_shape(draw)))

    def branch() -> PyTree:
        leaves = list(likes)
        stacks = jax.lax.cond(count >= 0, lambda: stacked(draw()), nothing)
        for indices, parts in zip(groups, unstacked(*stacks), strict=True):
            _put(parts, indices, leaves)
        return jax.tree.unflatten(treedef, leaves)

    return jax.lax.platform_dependent(cpu=branch, default=draw)


def _stack(leaves: list[jax.Array], indices: list[int]) -> jax.Array:
    return jnp.stack([leaves[i] for i in indices])


def _put(parts: Sequence[jax.Array], indices: list[int], leaves: list[jax.Array]) -> None:
    """Puts the parts of a stack back in their places among the leaves."""
    for i, part in zip(indices, parts, strict=True):
        leaves[i] = part
