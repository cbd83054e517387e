"""Adds per-example gradients of several points, or forms them from factors."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._ghost_clipping.plan import Plan
from dpoptax._ghost_clipping.records.parameter_values import ParameterEvaluator
from dpoptax._ghost_clipping.records.record_points import (
    Records,
    WeightedPair,
    pairs_by_point,
    weighted_pairs,
)
from dpoptax._losses.derived_views import find_view
from dpoptax._losses.program import Use
from dpoptax._points.points import weigh
from dpoptax._support.tree import widen
from dpoptax._support.xla import round_to_dtype


def form_gradients(plan: Plan, records: Records) -> dict[int, jax.Array]:
    """Returns the per-example gradients (B, ...) of the formed parameters.

    Gradients from factors of one use are rounded to `records.factor_dtype` like the factors, since
    they may be large. All others are in float32.
    """
    points = zip(records.at_points, records.points.weights, strict=True)
    opaque = ((i, widen(weigh(x, w))) for point, w in points for i, x in point.gradients.items())
    total: dict[int, jax.Array] = {}
    for leaf, value in itertools.chain(opaque, _form_used_gradients(plan, records)):
        total[leaf] = widen(total[leaf]) + widen(value) if leaf in total else value
    return total


def _form_used_gradients(plan: Plan, records: Records) -> Iterator[tuple[int, jax.Array]]:
    """Yields parameters and their per-example gradients (B, ...) from formed uses."""
    for use in plan.formed_uses:
        view = find_view(use.value)
        if view is None:
            yield from _pull_back(use, records)
            continue
        pairs = weighted_pairs(use, records, True)
        gradient = _form_use(use, pairs, records.factor_dtype, rounded=True)
        shape = jnp.shape(records.leaves[0][view.leaf])
        yield view.leaf, jax.vmap(functools.partial(view.scatter, shape=shape))(gradient)


def _form_use(
    use: Use,
    pairs: Sequence[WeightedPair],
    dtype: DTypeLike | None,
    *,
    rounded: bool = False,
) -> jax.Array:
    """Forms per-example gradients of a used value, (B, ...).

    The factors are rounded to `dtype`, and the gradients as well if `rounded`. Otherwise these are
    in float32.
    """
    groups, rows, columns = use.rule.layout.sizes

    def form(row_parts: Callable[..., list[tuple[jax.Array, jax.Array]]]) -> jax.Array:
        by_pair = [
            [
                Segment(*part).rounded(dtype)
                for part in jax.vmap(row_parts)(operand, weigh(cotangent, weight))
            ]
            for operand, cotangent, weight in pairs
        ]
        sizes = groups, rows // len(by_pair[0]), columns
        parts = [
            factor_products.multiply_factors(list(segments), sizes)
            for segments in zip(*by_pair, strict=True)
        ]
        if rounded and dtype is not None:
            parts = [round_to_dtype(part, dtype) for part in parts]
        return jnp.concatenate(parts, axis=2)

    gradients: jax.Array = lax.platform_dependent(
        tpu=lambda: form(use.rule.row_parts),
        default=lambda: form(lambda operand, cotangent: [use.rule.factors(operand, cotangent)]),
    )
    stack = tuple(n for n, stacked in use.loops if stacked)
    return jax.vmap(lambda g: use.rule.layout.fold(g, (*stack, *use.value.aval.shape)))(gradients)


def _pull_back(use: Use, records: Records) -> Iterator[tuple[int, jax.Array]]:
    """Yields gradients of the parameters behind a used value, (B, ...) each, at each point."""

    def value(leaves: list[jax.Array]) -> jax.Array:
        return ParameterEvaluator(leaves)(use.value)

    pairs = pairs_by_point(use, records)
    for leaves, (operand, cotangent, weight) in zip(records.leaves, pairs, strict=True):
        out, transpose = jax.vjp(value, leaves)
        gradient = _form_use(use, [(operand, cotangent, 1.0)], records.factor_dtype)
        pulled = jax.vmap(transpose)(gradient.astype(out.dtype))[0]
        for leaf in sorted(use.value.leaves):
            yield leaf, widen(weigh(pulled[leaf], weight))
