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
from dpoptax._pieces import Pieces, Sums, sum_pieces, unbundle
from dpoptax._plan import Plan

# Parameters of at most this many entries are handled together, to compile fewer operations.
_SMALL = 2**16


def sum_one_by_one(
    clip: Clip,
    statistic: Any,
    groups: list[int],
    zeros: Sums,
    plan: Plan,
    pieces: Pieces,
    mask: jax.Array,
) -> tuple[Sums, Any]:
    """The clipped sum, of the shapes of `zeros`, and the sum of the clip's statistic.

    `groups` has the group of each parameter. Small sums of a group go as one vector, since every
    operation takes time to compile. Large ones stay apart, so that they need not be held twice.
    """
    (outer, factors), (plan, pieces) = _split(plan, pieces)
    tops, lengths = _sizes(outer, factors, mask.size)
    outer_groups = [
        groups[p.leaf]
        for p, (segment,) in zip(outer.products, factors.products, strict=True)
        for _ in range(segment.rows.shape[1])
    ]
    by_leaf = {p.leaf: zeros.by_leaf[p.leaf] for p in plan.products}
    own = dataclasses.replace(zeros, by_leaf=by_leaf)
    arrays, structure = jax.tree.flatten(own)
    array_groups = [groups[i] for i in (*sorted(by_leaf), *(b[0] for b in own.bundles))]
    bundles = _bundles(array_groups, [array.size for array in arrays])
    group_of = [array_groups[bundle[0]] for bundle in bundles]
    membership = np.eye(1 + max(groups), dtype=np.float32)[group_of + outer_groups]
    weights = [jnp.ones(1, jnp.float32)] * (len(pieces.products) + len(pieces.formed))
    kept = [None] * len(pieces.products)

    def joined(arrays: list[jax.Array], bundle: list[int]) -> jax.Array:
        alone = len(bundle) == 1
        return arrays[bundle[0]] if alone else jnp.concatenate([arrays[i].ravel() for i in bundle])

    def add(sums: tuple[Any, Any], inputs: Any) -> tuple[Any, jax.Array]:
        example, used, top, length = jax.tree.map(lambda x: x[None], inputs)
        gradient = jax.tree.leaves(sum_pieces(own, plan, example, weights, kept))
        vectors = [joined(gradient, bundle)[None] for bundle in bundles]
        (*units, top), scale, used = unit_gradients([*vectors, top], used)
        squares = [square_sum(unit)[:, None] for unit in units] + [jnp.square(top * length)]
        square = jnp.matmul(jnp.concatenate(squares, axis=1), membership, precision="highest")
        norms = jnp.sqrt(square)
        coefficients = scaled_factors(clip, scale, norms)[0]
        added = zip(sums[0], group_of, units, strict=True)
        total = [t + coefficients[group] * unit[0] for t, group, unit in added]
        more = statistic(scale * norms[:, 0], used)
        outer_weights = coefficients[np.array(outer_groups, int)] * top[0]
        return (total, None if more is None else sums[1] + more), outer_weights

    start = (
        [joined(arrays, bundle) for bundle in bundles],
        statistic(jnp.zeros(1), jnp.zeros(1, bool)),
    )
    (total, beside), outer_weights = lax.scan(add, start, (pieces, mask, tops, lengths))
    for vector, bundle in zip(total, bundles, strict=True):
        parts = unbundle(vector.ravel(), [arrays[i] for i in bundle])
        for i, part in zip(bundle, parts, strict=True):
            arrays[i] = part.astype(arrays[i].dtype)
    own = jax.tree.unflatten(structure, arrays)
    sums = dataclasses.replace(own, by_leaf={**zeros.by_leaf, **own.by_leaf})
    return _add_outer(sums, outer, factors, outer_weights), beside


def _split(plan: Plan, pieces: Pieces) -> tuple[tuple[Plan, Pieces], tuple[Plan, Pieces]]:
    """The products of one position, and the rest."""
    outer = [product.method == "outer" for product in plan.products]

    def pick(chosen: list[bool], **rest: Any) -> tuple[Plan, Pieces]:
        products = tuple(itertools.compress(plan.products, chosen))
        segments = list(itertools.compress(pieces.products, chosen))
        return (
            dataclasses.replace(plan, products=products),
            dataclasses.replace(pieces, products=segments, **rest),
        )

    return pick(outer, formed=[], bundles=()), pick([not one for one in outer])


def _sizes(plan: Plan, pieces: Pieces, batch: int) -> tuple[jax.Array, jax.Array]:
    """The largest entries of products of one position, and their norms over that, (B, Σ K)."""
    tops, lengths = [jnp.zeros((batch, 0))], [jnp.zeros((batch, 0))]
    for product, (segment,) in zip(plan.products, pieces.products, strict=True):
        _, top, length = _products.unit_outer(segment)
        tops.append(top * abs(product.view.scale))
        lengths.append(length)
    return jnp.concatenate(tops, axis=1), jnp.concatenate(lengths, axis=1)


def _bundles(groups: list[int], sizes: list[int]) -> list[list[int]]:
    """Which arrays go together: the large ones alone, the others by group."""
    bundles = [[i] for i, size in enumerate(sizes) if size > _SMALL]
    for group in sorted(set(groups)):
        small = [i for i, g in enumerate(groups) if g == group and sizes[i] <= _SMALL]
        bundles += [small] if small else []
    return bundles


def _add_outer(start: Sums, plan: Plan, pieces: Pieces, weights: jax.Array) -> Sums:
    """start + the weighted sums of products of one position, by their scaled factors."""
    # Scaled anew, behind a barrier: otherwise the scaled factors are held across the scan.
    products, weights = lax.optimization_barrier((pieces.products, weights))
    units, unit_weights, signed = [], [], []
    for product, (segment,) in zip(plan.products, products, strict=True):
        unit, top, _ = _products.unit_outer(segment)
        units.append([unit])
        unit_weights.append(weights[:, : top.shape[1]])
        weights = weights[:, top.shape[1] :]
        (member,) = product.members
        view = dataclasses.replace(member.view, scale=float(np.sign(member.view.scale)))
        member = dataclasses.replace(member, view=view)  # the magnitude is in the weight
        signed.append(dataclasses.replace(product, members=(member,)))
    plan = dataclasses.replace(plan, products=tuple(signed))
    pieces = dataclasses.replace(pieces, products=units)
    return sum_pieces(start, plan, pieces, unit_weights, [None] * len(units))
