"""Collects per-example gradients, represented by factors or formed.

Norm and sum read the numbers that are collected here.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax import _ghost_clipping, _losses
from dpoptax._ghost_clipping.plan import Plan, PlannedUse, Product
from dpoptax._ghost_clipping.records.record_points import (
    Records,
    WeightedPair,
    pairs_by_point,
    weighted_pairs,
)
from dpoptax._ghost_clipping.records.run_block import ParameterEvaluator
from dpoptax._losses.traced_program import Use
from dpoptax._points.points import weigh
from dpoptax._rounding.bounds import within_range
from dpoptax._support.tree import widen
from dpoptax._support.xla import materialize, round_to_dtype

if TYPE_CHECKING:
    from dpoptax._ghost_clipping.factor_products import FactoredGradients, Segment

# Smaller formed gradients share one array, since many arrays compile slowly.
_BUNDLED_ENTRIES = 2**10


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleGradients:
    """Holds the gradient of each example.

    Attributes:
      plan: how norms and sums are computed.
      products: the factors and fixed terms of each product. A factor that the sum does not multiply
        by coefficients is finite.
      formed: the gradient of one parameter, (B, …), or the concatenated gradients of several small
        ones, (B, entries), by the numbers of the parameters. They are finite.
    """

    plan: Plan
    products: "list[FactoredGradients]"
    formed: dict[tuple[int, ...], jax.Array]


def collect_gradients(
    plan: Plan, records: Records, groups: list[int], *, differences: bool, bundled_size: int = 0
) -> ExampleGradients:
    """Returns the per-example gradients Σ_j w_j G_j.

    With `differences`, products at several points are written in terms of the first point's operand
    and differences from it, X_0ᵀ Σ_j w_j D_j + Σ_j w_j (X_j − X_0)ᵀ D_j. Weights that are large and
    cancel then multiply small numbers, at the cost of more passes over memory.

    Factors are rounded to `records.factor_dtype`, and so are most gradients that are formed from
    them. The rounded gradients are clipped.
    """
    # `groups` has the clip's group of each parameter. A bundle has one norm, so that its parameters
    # share a group.
    bundles = _bundle_gradients(_form_gradients(plan, records), groups, bundled_size)
    # Norm and sum must read the same numbers.
    formed = materialize({leaves: within_range(x) for leaves, x in bundles.items()})
    uses = [collect_factors(product, records, differences) for product in plan.products]
    if any(product.is_pulled for product in plan.products):
        from dpoptax._ghost_clipping.transformed.point_differences import pull_back_product
        from dpoptax._ghost_clipping.transformed.pull_back import FixedArrays

        fixed = [FixedArrays(leaves) for leaves in records.leaves]
    products = [
        pull_back_product(product, factors, records.factor_dtype, fixed, differences=differences)
        if product.is_pulled
        else _ghost_clipping.factor_products.FactoredGradients(
            [segment.rounded(records.factor_dtype) for _, segment in factors], product.layout.sizes
        )
        for product, factors in zip(plan.products, uses, strict=True)
    ]
    return ExampleGradients(plan, products, formed)


def _form_gradients(plan: Plan, records: Records) -> dict[int, jax.Array]:
    """Returns the per-example gradients (B, ...) of the formed parameters.

    Gradients from factors of one use are rounded to `records.factor_dtype` like the factors, since
    they may be large. All others are in float32.
    """
    points = zip(records.at_points, records.points.weights, strict=True)
    opaque = ((i, widen(weigh(x, w))) for point, w in points for i, x in point.gradients.items())
    total: dict[int, jax.Array] = {}
    # A parameter may be opaque and also have uses, and each point adds a gradient.
    for leaf, value in itertools.chain(opaque, _form_used_gradients(plan, records)):
        total[leaf] = widen(total[leaf]) + widen(value) if leaf in total else value
    return total


def _form_used_gradients(plan: Plan, records: Records) -> Iterator[tuple[int, jax.Array]]:
    """Yields parameters and their per-example gradients (B, ...) from formed uses."""
    for use in plan.formed_uses:
        view = _losses.derived_views.find_view(use.value)
        if view is None:
            yield from _pull_back(use, records)
            continue
        pairs = weighted_pairs(use, records, True)
        gradient = _form_use(use, pairs, records.factor_dtype, rounded=True)
        shape = jnp.shape(records.leaves[0][view.leaf])
        yield view.leaf, jax.vmap(functools.partial(view.scatter, shape=shape))(gradient)


def _form_use(
    use: Use, pairs: Sequence[WeightedPair], dtype: DTypeLike | None, *, rounded: bool = False
) -> jax.Array:
    """Forms per-example gradients of a used value, (B, ...).

    The factors are rounded to `dtype`, and the gradients as well if `rounded`. Otherwise these are
    in float32.
    """
    stacks, rows, columns = use.rule.layout.sizes
    factor_products = _ghost_clipping.factor_products

    def form(row_parts: Callable[..., list[tuple[jax.Array, jax.Array]]]) -> jax.Array:
        by_pair = [
            [
                factor_products.Segment(*part).rounded(dtype)
                for part in jax.vmap(row_parts)(operand, weigh(cotangent, weight))
            ]
            for operand, cotangent, weight in pairs
        ]
        # All parts have equally many rows. Their gradients, (B, K, R, D), are joined along R.
        sizes = stacks, rows // len(by_pair[0]), columns
        parts = [
            factor_products.multiply_factors(list(segments), sizes)
            for segments in zip(*by_pair, strict=True)
        ]
        if rounded and dtype is not None:
            parts = [round_to_dtype(part, dtype) for part in parts]
        return jnp.concatenate(parts, axis=2)

    gradients: jax.Array = lax.platform_dependent(
        tpu=lambda: form(use.rule.row_parts),
        default=lambda: form(lambda operand, cotangent: [use.rule.factorize(operand, cotangent)]),
    )
    # A value that has a slice for each step represents its whole stack.
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
        # The only argument of `value` is the list of all parameters.
        pulled = jax.vmap(transpose)(gradient.astype(out.dtype))[0]
        for leaf in sorted(use.value.leaves):
            yield leaf, widen(weigh(pulled[leaf], weight))


def _bundle_gradients(
    formed: dict[int, jax.Array], groups: list[int], bundled_size: int
) -> dict[tuple[int, ...], jax.Array]:
    """Joins small formed gradients of one clip group into one array (B, entries).

    The others keep their shapes, (B, …).
    """
    bundles: dict[tuple[int, int | None], list[int]] = {}
    for leaf, gradient in formed.items():
        entries = math.prod(gradient.shape[1:])
        small = entries <= _BUNDLED_ENTRIES or gradient.size <= bundled_size
        # The key of a large gradient contains its leaf, so it is not joined.
        bundles.setdefault((groups[leaf], None if small else leaf), []).append(leaf)

    return {tuple(each): _join([formed[leaf] for leaf in each]) for each in bundles.values()}


def _join(gradients: list[jax.Array]) -> jax.Array:
    """Returns arrays (B, …) as one array (B, entries), and a single array in its shape."""
    if len(gradients) == 1:
        return gradients[0]  # on TPU, which tiles the last two axes, a reshape is a copy
    flat = [g.reshape(g.shape[0], math.prod(g.shape[1:])) for g in gradients]
    return jnp.concatenate(flat, axis=1)


def collect_factors(
    product: Product, records: Records, differences: bool
) -> "list[tuple[PlannedUse, Segment]]":
    """Returns the weighted factors of a product, for each use and point."""
    return [
        (member, _segment(member, pair, records))
        for member in product.members
        for pair in (
            weighted_pairs(member.use, records, differences)
            if member.pull_back_counts is None
            else pairs_by_point(member.use, records)
        )
    ]


def _segment(member: PlannedUse, pair: WeightedPair, records: Records) -> "Segment":
    operand, cotangent, weight = pair
    if (weight, member.scale) != (1.0, 1.0):
        # The selection also keeps the compiler from multiplying weights and coefficients in another
        # order.
        cotangent = within_range(weigh(cotangent, weight, member.scale))
    segment = make_segment(member, operand, cotangent)
    if records.early:
        return segment  # of records, which are in the working range where necessary
    factors = _ghost_clipping.factor_products
    return factors.Segment(*(x if factors.is_one_hot(x) else within_range(x) for x in segment))


def make_segment(member: PlannedUse, operand: jax.Array, cotangent: jax.Array) -> "Segment":
    """Returns the factors of one use, in the layout of its product."""
    factors = _ghost_clipping.factor_products
    segment = factors.Segment(*jax.vmap(member.use.rule.factorize)(operand, cotangent))
    segment = segment if member.cut is None else member.cut(segment)
    return segment.swapped if member.swapped else segment
