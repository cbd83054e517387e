"""Collects gradients of parameters that are transformed before use."""

from dpoptax._gradients.ghost_clipping.norms.factor_products import FactoredGradients
from dpoptax._gradients.ghost_clipping.passes.run_passes import Passes
from dpoptax._gradients.ghost_clipping.plan import Plan, Product
from dpoptax._gradients.ghost_clipping.sums.example_gradients import UseSegment, join_factors
from dpoptax._gradients.ghost_clipping.transformed.cotangents import FixedTerm, OuterSum
from dpoptax._gradients.ghost_clipping.transformed.point_differences import pull_back_points
from dpoptax._gradients.ghost_clipping.transformed.pull_back import FixedArrays
from dpoptax._gradients.ghost_clipping.transformed.pulled_back_norms import assemble_gradients


def pull_products(
    plan: Plan, passes: Passes, uses: list[list[UseSegment]], *, differences: bool
) -> list[FactoredGradients]:
    """Returns all products of a plan from the factors of their uses.

    Args:
      plan: a plan with products whose gradients are pulled back.
      passes: the recorded arrays.
      uses: the uses of each product, at all points.
      differences: as for `collect_gradients`.
    """
    fixed = [FixedArrays(leaves) for leaves in passes.leaves]

    def factored(product: Product, own: list[UseSegment]) -> FactoredGradients:
        if not product.is_pulled:
            return join_factors(product, own, passes.factor_dtype)
        parts = _pull_back(product, own, fixed, differences=differences)
        return assemble_gradients(*parts, passes.factor_dtype)

    return list(map(factored, plan.products, uses))


def _pull_back(
    product: Product, uses: list[UseSegment], fixed: list[FixedArrays], *, differences: bool
) -> tuple[list[OuterSum], list[FixedTerm]]:
    """Returns the gradients of a parameter behind used values, at all points."""
    outers: list[OuterSum] = []
    terms: list[FixedTerm] = []
    for member in product.members:
        segments = [use.segment for use in uses if use.member is member]
        if member.pull_back_counts is None:
            outers += [OuterSum(segment, member.layout, product.shape) for segment in segments]
            continue
        found = pull_back_points(member.use, product.leaf, segments, fixed, differences=differences)
        outers += found[0]
        terms += found[1]
    return outers, terms
