"""The clipped sum with one example's gradient formed after the other, for all that floats can hold.

Norms that plain arithmetic cannot give (squares that overflow or underflow, sums that cancel) are
those of the very numbers that are added: a gradient is formed, divided by its largest entry,
measured and summed. Gradients of one position need not be formed: as factors that are scaled to
entries of at most 1, both their norm and their share of the sum are exact.
"""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax import _products
from dpoptax._clipping import Clip, scaled_factors, square_sum, unit_gradients
from dpoptax._pieces import Pieces, sum_pieces, unbundle, wide_zeros
from dpoptax._plan import Plan, Product

# Parameters of at most this many entries are handled together, to compile fewer operations.
_SMALL = 2**16


def sum_one_by_one(
    clip: Clip, statistic: Any, params: Any, plan: Plan, pieces: Pieces, mask: jax.Array
) -> tuple[Any, Any]:
    """The clipped sum, shaped like the parameters, and the sum of the clip's statistic.

    Small parameters of a group go as one vector, since every operation takes time to compile. Large
    ones stay apart, so that their gradients need not be held in memory.
    """
    leaves, structure = jax.tree.flatten(params)
    groups = clip.groups(params)
    outer, plan, pieces = _split(plan, pieces)
    tops, lengths = _sizes(outer, mask.size)
    outer_groups = [groups[p.leaf] for p, segment in outer for _ in range(segment.rows.shape[1])]
    bundles = _bundles(plan, pieces, groups, [leaf.size for leaf in leaves])
    group_of = [groups[bundle[0]] for bundle in bundles]
    membership = np.eye(1 + max(groups), dtype=np.float32)[group_of + outer_groups]
    weights = [jnp.ones(1, jnp.float32)] * (len(pieces.products) + len(pieces.formed))
    kept = [None] * len(pieces.products)

    def joined(values: list[jax.Array], bundle: list[int]) -> jax.Array:
        alone = len(bundle) == 1
        return values[bundle[0]] if alone else jnp.concatenate([values[i].ravel() for i in bundle])

    def add(sums: tuple[Any, Any], inputs: Any) -> tuple[Any, jax.Array]:
        example, used, top, length = jax.tree.map(lambda x: x[None], inputs)
        gradient = jax.tree.leaves(sum_pieces(params, plan, example, weights, kept))
        vectors = [joined(gradient, bundle)[None] for bundle in bundles]
        (*units, top), scale, used = unit_gradients([*vectors, top], used)
        squares = [square_sum(unit)[:, None] for unit in units] + [jnp.square(top * length)]
        square = jnp.matmul(jnp.concatenate(squares, axis=1), membership, precision="highest")
        norms = jnp.sqrt(square)
        factors = scaled_factors(clip, scale, norms)[0]
        added = zip(sums[0], group_of, units, strict=True)
        total = [t + factors[group] * unit[0] for t, group, unit in added]
        more = statistic(scale * norms[:, 0], used)
        outer_weights = factors[np.array(outer_groups, int)] * top[0]
        return (total, None if more is None else sums[1] + more), outer_weights

    zeros = [wide_zeros(leaf) for leaf in leaves]
    start = (
        [joined(zeros, bundle) for bundle in bundles],
        statistic(jnp.zeros(1), jnp.zeros(1, bool)),
    )
    (total, beside), outer_weights = lax.scan(add, start, (pieces, mask, tops, lengths))
    sums = list(zeros)
    for vector, bundle in zip(total, bundles, strict=True):
        for leaf, part in unbundle(vector.ravel(), bundle, leaves):
            sums[leaf] = part
    for leaf, part in _outer_sums(outer, outer_weights):
        sums[leaf] += part
    sums = [s.astype(zero.dtype) for s, zero in zip(sums, zeros, strict=True)]
    return jax.tree.unflatten(structure, sums), beside


_Outer = list[tuple[Product, _products.Segment]]


def _split(plan: Plan, pieces: Pieces) -> tuple[_Outer, Plan, Pieces]:
    """The products of one position, and the plan and the pieces without them."""
    formed = [product.method != "outer" for product in plan.products]
    outer = [
        (product, segments[0])
        for product, segments in zip(plan.products, pieces.products, strict=True)
        if product.method == "outer"
    ]
    products = tuple(itertools.compress(plan.products, formed))
    segments = list(itertools.compress(pieces.products, formed))
    return (
        outer,
        dataclasses.replace(plan, products=products),
        dataclasses.replace(pieces, products=segments),
    )


def _sizes(outer: _Outer, batch: int) -> tuple[jax.Array, jax.Array]:
    """The largest entries of products, and their norms over that, (B, Σ K)."""
    tops, lengths = [jnp.zeros((batch, 0))], [jnp.zeros((batch, 0))]
    for product, segment in outer:
        _, top, length = _products.unit_outer(segment)
        tops.append(top * abs(product.view.scale))
        lengths.append(length)
    return jnp.concatenate(tops, axis=1), jnp.concatenate(lengths, axis=1)


def _bundles(plan: Plan, pieces: Pieces, groups: list[int], sizes: list[int]) -> list[list[int]]:
    """The parameters with gradients that are formed: the large ones alone, the others by group."""
    there = sorted({p.leaf for p in plan.products}.union(*pieces.bundles))
    bundles = [[i] for i in there if sizes[i] > _SMALL]
    for group in sorted(set(groups)):
        small = [i for i in there if groups[i] == group and sizes[i] <= _SMALL]
        bundles += [small] if small else []
    return bundles


def _outer_sums(outer: _Outer, weights: jax.Array) -> list[tuple[int, jax.Array]]:
    """The weighted sums of scaled products, each with its parameter."""
    # Scaled anew, behind a barrier: otherwise the scaled factors are held across the scan.
    segments, weights = lax.optimization_barrier(([segment for _, segment in outer], weights))
    sums, start = [], 0
    for (product, _), segment in zip(outer, segments, strict=True):
        unit, top, _ = _products.unit_outer(segment)
        weight = weights[:, start : start + top.shape[1]] * np.sign(product.view.scale)
        start += top.shape[1]
        part = _products.weighted_sum([unit], weight, product.layout.sizes)
        view = dataclasses.replace(product.view, scale=1.0)
        part = view.scatter(product.layout.fold(part, product.layout.split), product.shape)
        sums.append((product.leaf, part))
    return sums
