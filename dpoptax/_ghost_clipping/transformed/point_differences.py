"""Pulls back gradients at several points and adds them.

The chain rule uses the parameters of each point, so the gradients of each point are pulled back
separately. Then the outer products and fixed terms of all points are added. If the weights are
large and cancel, or the data are equal at all points, the sums are written in terms of the first
point's factors and differences from them,

    Σ_j r_j ⊗ c_j = r_0 ⊗ Σ_j c_j + Σ_j (r_j − r_0) ⊗ c_j,

and similarly for fixed terms V_j ⊙ w_j.
"""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.factor_products import FactoredGradients, Segment
from dpoptax._ghost_clipping.plan import PlannedUse, Product, PullBackCounts
from dpoptax._ghost_clipping.transformed.cotangents import FixedTerm, NotFactoredError, OuterSum
from dpoptax._ghost_clipping.transformed.pull_back import CotangentSum, FixedArrays, pull_back
from dpoptax._ghost_clipping.transformed.pulled_back_norms import (
    assemble_gradients,
    check_parts,
    scaled_segment,
    split_cotangent,
)
from dpoptax._losses.rules import FactorLayout
from dpoptax._losses.traced_program import Use
from dpoptax._rounding.bounds import within_range
from dpoptax._support.tree import widen
from dpoptax._support.xla import materialize


def pull_back_product(
    product: Product,
    uses: Sequence[tuple[PlannedUse, Segment]],
    dtype: DTypeLike | None,
    fixed: list[FixedArrays],
    *,
    differences: bool,
) -> FactoredGradients:
    """Returns the gradients of a parameter behind used values, at all points.

    Args:
      product: a product whose gradients are pulled back.
      uses: the uses and their factors, at all points.
      dtype: the dtype that factors are rounded to; `None` for no rounding.
      fixed: the arrays computed from the parameters of each point.
      differences: as for `collect_gradients`.
    """
    outers: list[OuterSum] = []
    terms: list[FixedTerm] = []
    for member in product.members:
        segments = [segment for use, segment in uses if use is member]
        if member.pull_back_counts is None:
            outers += [OuterSum(segment, member.layout) for segment in segments]
            continue
        found = pull_back_points(member.use, product.leaf, segments, fixed, differences=differences)
        outers += found[0]
        terms += found[1]
    return assemble_gradients(outers, terms, dtype)


def pull_back_points(
    use: Use, leaf: int, segments: list[Segment], fixed: list[FixedArrays], *, differences: bool
) -> tuple[list[OuterSum], list[FixedTerm]]:
    """Returns the gradients of a parameter from the factors of a use at each point.

    The factors include the weights.

    Args:
      use: a use of a value computed from the parameter.
      leaf: the parameter.
      segments: the factors at each point.
      fixed: the arrays computed from the parameters of each point.
      differences: whether to write sums with differences from the first point.

    Raises:
      NotFactoredError: the gradients do not have this form.
    """
    if not use.operand_varies:
        # The data are the same at all points. Sharing one array lets `_join_outers` detect this.
        segments = [segment._replace(rows=segments[0].rows) for segment in segments]
    if use.rule.layout.split != use.value.aval.shape:  # groups of a convolution
        raise NotFactoredError
    found = [
        pull_back(use.value, leaf, OuterSum(segment, use.rule.layout), arrays)
        for segment, arrays in zip(segments, fixed, strict=True)
    ]
    for gradients in found:  # before scales go into the factors
        check_parts(gradients.outers, gradients.terms)
    outers_by_part = list(zip(*(g.outers for g in found), strict=True))
    terms_by_part = list(zip(*(g.terms for g in found), strict=True))
    several = len(found) > 1
    joined = several and (differences or not use.operand_varies)
    outers = [x for points in outers_by_part for x in (_join_outers(points) if joined else points)]
    joined = several and differences
    terms = [x for points in terms_by_part for x in (_join_terms(points) if joined else points)]
    return split_cotangent(CotangentSum(found[0].shape, outers, terms))


def count_parts(
    use: Use, parameters: Sequence[ShapedArray], points: int
) -> list[tuple[int, FactorLayout, PullBackCounts]]:
    """Counts the parts that `pull_back_points` gives for each parameter.

    Each entry of the result is a parameter, the layout, and the counts. The result is empty if the
    gradient of a parameter does not have this form.
    """
    leaves = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in parameters]
    stacks, *sides = use.rule.layout.sizes
    factors = [jax.ShapeDtypeStruct((1, stacks, use.rule.positions, n), jnp.float32) for n in sides]
    found = []

    def pull(leaves: list[jax.Array], factors: list[list[jax.Array]]) -> None:
        segments = [Segment(*pair) for pair in factors]
        fixed = [FixedArrays(leaves) for _ in segments]
        for leaf in sorted(use.value.leaves):
            outers, terms = pull_back_points(use, leaf, segments, fixed, differences=False)
            positions = {x.segment.rows.shape[2] for x in outers}
            if len(positions) > 1:
                raise NotFactoredError
            pulled = PullBackCounts(len(outers), positions.pop(), len(terms))
            found.append((leaf, outers[0].layout, pulled))

    try:
        # Pulls back shapes of one example, without arrays, only to count the parts.
        jax.eval_shape(pull, leaves, [factors] * points)
    except NotFactoredError:
        return []
    return found


def _join_outers(points: tuple[OuterSum, ...]) -> list[OuterSum]:
    """Writes a sum of outer products with the first rows and differences from them."""
    first, segments = points[0], [scaled_segment(x) for x in points]
    rows, columns = zip(*segments, strict=True)
    found = [Segment(rows[0], functools.reduce(operator.add, columns))]
    # Differences of points that share their rows are exactly zero, and are left out.
    if any(r is not rows[0] for r in rows):
        start = widen(rows[0])
        found += [Segment(r - start, c) for r, c in segments[1:]]
    # Stored, since XLA may round sums of products differently each time.
    stored = materialize([Segment(*map(within_range, x)) for x in found])
    return [OuterSum(x, first.layout) for x in stored]


def _join_terms(points: tuple[FixedTerm, ...]) -> list[FixedTerm]:
    """Writes a sum of fixed terms with the first basis and differences from it."""
    first = points[0]
    found = [FixedTerm(first.basis, functools.reduce(operator.add, [t.weights for t in points]))]
    if first.basis is not None:
        # The program decides whether a basis is `None`, so it is the same at all points.
        others = ((t.basis, t.weights) for t in points[1:] if t.basis is not None)
        found += [FixedTerm(materialize(basis - first.basis), weights) for basis, weights in others]
    return found
