"""Divides per-example gradients by powers of two.

The gradients are represented by factors or formed. Each example has its own powers of two, so that
its largest entries are about 1 and squares neither overflow nor underflow.
"""

import dataclasses
import functools
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.cost_model import COSTS
from dpoptax._ghost_clipping.norms.factor_products import FactoredGradients, Segment
from dpoptax._ghost_clipping.passes.run_passes import (
    Passes,
    pairs_by_point,
    weighted_pairs,
)
from dpoptax._ghost_clipping.plan import Plan, PlannedUse, Product
from dpoptax._losses.program import Use
from dpoptax._points.points import weigh
from dpoptax._rounding import bounds
from dpoptax._rounding.bounds import Scales
from dpoptax._support.tree import widen
from dpoptax._support.xla import materialize, unstack

# The exponents of the powers of two that divide operands and cotangents, (B,) each.
Exponents: TypeAlias = tuple[jax.Array, jax.Array]


class UseOperands(NamedTuple):
    """Holds a use with its operand and its cotangent times the weight, at one point."""

    member: PlannedUse
    operand: jax.Array
    cotangent: jax.Array


class LargestEntries(NamedTuple):
    """Holds the largest entries of a piece's two sides, (B,) each.

    `operand_varies` says whether the operands depend on parameters.
    """

    operand: jax.Array
    operand_varies: bool
    cotangent: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class ScaledGradients:
    """Holds per-example gradients divided by powers of two.

    Attributes:
      plan: how norms and sums are computed.
      products: the factors and fixed terms of each product. No entry is above 2.
      formed: the gradient of one parameter, (B, …), or the concatenated gradients of several small
        ones, (B, entries), for each bundle.
      scales: the divisors, first of products, then of bundles; `None` without gradients.
      bundles: the parameters in each of `formed`.
    """

    plan: Plan
    products: list[FactoredGradients]
    formed: list[jax.Array]
    scales: Scales | None
    bundles: tuple[tuple[int, ...], ...]


def scale_gradients(
    plan: Plan, passes: Passes, groups: list[int], *, differences: bool
) -> ScaledGradients:
    """Returns the per-example gradients Σ_j w_j G_j, plus the part of the tangent.

    With `differences`, products at several points are written in terms of the first point's operand
    and differences from it, X_0ᵀ Σ_j w_j D_j + Σ_j w_j (X_j − X_0)ᵀ D_j. Weights that are large and
    cancel then multiply small numbers, at the cost of more passes over memory.

    Factors are rounded to `passes.factor_dtype`, and so are most gradients that are formed from
    them. The rounded gradients are clipped.
    """
    (first, *others), weights = passes.at_points, passes.points.weights
    gradients = {i: widen(weigh(x, weights[0])) for i, x in first.gradients.items()}
    if others or passes.tangent is not None or plan.formed_uses:
        from dpoptax._ghost_clipping.sums.formed_gradients import add_gradients

        gradients = add_gradients(gradients, plan, passes)
    formed, bundles = _bundle_gradients(gradients, groups)
    # Norm and sum must read the same numbers.
    formed = materialize(formed)
    uses_of_products = [collect_operands(product, passes, differences) for product in plan.products]
    largest = [largest_entries(uses) for uses in uses_of_products]
    # A formed gradient counts as a cotangent with an operand of 1.
    largest += [
        LargestEntries(operand=jnp.ones_like(top), operand_varies=True, cotangent=top)
        for top in map(bounds.largest_entry, formed)
    ]
    if not largest:
        return ScaledGradients(plan, [], [], None, ())
    scales, exponents = make_product_scales(largest)
    divided = [
        [scale_segment(*use, exponent) for use in uses]
        for uses, exponent in zip(uses_of_products, exponents, strict=False)
    ]
    if plan.is_pulled:
        from dpoptax._ghost_clipping.sums.transformed_gradients import scale_transformed

        members = [[use.member for use in uses] for uses in uses_of_products]
        products, scales = scale_transformed(
            plan, passes, members, divided, scales, differences=differences
        )
    else:
        dtype = passes.factor_dtype
        products = [
            FactoredGradients([segment.rounded(dtype) for segment in own], product.layout.sizes)
            for product, own in zip(plan.products, divided, strict=True)
        ]
    formed = [
        bounds.divide_by_power(x, exponent)
        for x, (_, exponent) in zip(formed, exponents[len(products) :], strict=True)
    ]
    return ScaledGradients(plan, products, formed, scales, bundles)


def _bundle_gradients(
    formed: dict[int, jax.Array], groups: list[int]
) -> tuple[list[jax.Array], tuple[tuple[int, ...], ...]]:
    """Joins small formed gradients of one clip group into one array (B, entries).

    The others keep their shapes, (B, …).
    """
    bundles: dict[tuple[int, int | None], list[int]] = {}
    for leaf, gradient in formed.items():
        small = math.prod(gradient.shape[1:]) <= COSTS.bundled_entries
        bundles.setdefault((groups[leaf], None if small else leaf), []).append(leaf)

    found = [_join([formed[leaf] for leaf in bundle]) for bundle in bundles.values()]
    return found, tuple(map(tuple, bundles.values()))


def _join(gradients: list[jax.Array]) -> jax.Array:
    """Returns arrays (B, …) as one array (B, entries), and a single array in its shape."""
    if len(gradients) == 1:
        return gradients[0]  # on TPU, which tiles the last two axes, a reshape is a copy
    flat = [g.reshape(g.shape[0], math.prod(g.shape[1:])) for g in gradients]
    return jnp.concatenate(flat, axis=1)


def collect_operands(product: Product, passes: Passes, differences: bool) -> list[UseOperands]:
    """Returns operands and weighted cotangents of a product, for each use and point."""
    return [
        UseOperands(member, operand, weigh(cotangent, weight, member.scale))
        for member in product.members
        for operand, cotangent, weight in (
            weighted_pairs(member.use, passes, differences)
            if member.pull_back_counts is None
            else pairs_by_point(member.use, passes)
        )
    ]


def largest_entries(uses: list[UseOperands]) -> LargestEntries:
    """Returns the largest entries of operands and cotangents over a product's uses."""
    cotangents = [bounds.largest_entry(use.cotangent) for use in uses]
    one = jnp.ones_like(cotangents[0])
    operands = [
        bounds.largest_entry(use.operand) if _has_magnitude(use.member.use, use.operand) else one
        for use in uses
    ]
    varies = any(use.member.use.operand_varies for use in uses)
    largest = functools.partial(functools.reduce, jnp.maximum)
    return LargestEntries(largest(operands), varies, largest(cotangents))


def make_product_scales(
    largest: list[LargestEntries],
) -> tuple[Scales, list[Exponents]]:
    """Returns the scales of all gradients, and the exponents for operand and cotangent of each.

    Scales of operands that do not depend on parameters are computed in a separate call. If
    `jax.vmap` maps a step over many parameters, these operands and their quotients then stay
    unmapped.
    """
    one = jnp.ones_like(largest[0].operand)
    data_exponents, data = bounds.make_scales(
        [(one if top.operand_varies else top.operand)[None] for top in largest]
    )
    other_exponents, others = bounds.make_scales(
        [jnp.stack([top.operand if top.operand_varies else one, top.cotangent]) for top in largest]
    )
    scales = Scales(
        data.exponent + others.exponent, jnp.concatenate([data.finite, others.finite], axis=1)
    )
    # The exponents of all products, one side after the other.
    fixed, changing = unstack(
        *(x.reshape(x.shape[0] * x.shape[1], one.size) for x in (data_exponents, other_exponents))
    )
    exponents = [
        (changing[2 * i] if top.operand_varies else fixed[i], changing[2 * i + 1])
        for i, top in enumerate(largest)
    ]
    return scales, exponents


def scale_segment(
    member: PlannedUse, operand: jax.Array, cotangent: jax.Array, exponents: Exponents
) -> Segment:
    """Returns the factors of one use, each divided by a power of two of the example."""
    operand_exponent, cotangent_exponent = exponents
    if _has_magnitude(member.use, operand):
        operand = bounds.divide_by_power(operand, operand_exponent)
        # Otherwise XLA would compute it twice, for the norm and for the sum, as two large arrays.
        operand = materialize(operand) if operand.size > COSTS.stored_entries else operand
    else:
        cotangent_exponent = cotangent_exponent + operand_exponent
    cotangent = bounds.divide_by_power(cotangent, cotangent_exponent)
    return make_segment(member, operand, cotangent)


def _has_magnitude(use: Use, operand: jax.Array) -> bool:
    """Returns whether the magnitude of an operand enters its factor.

    It does not if the factor is one-hot or the rule does not read data.
    """
    return use.rule.reads_data and not jnp.issubdtype(operand.dtype, jnp.integer)


def make_segment(member: PlannedUse, operand: jax.Array, cotangent: jax.Array) -> Segment:
    """Returns the factors of one use, in the layout of its product."""
    segment = Segment(*jax.vmap(member.use.rule.factors)(operand, cotangent))
    segment = segment if member.cut is None else member.cut(segment)
    return segment.swapped if member.swapped else segment
