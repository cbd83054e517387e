"""Collects gradients of parameters that are transformed before use."""

from collections.abc import Sequence

from jax.typing import DTypeLike

from dpoptax._gradients.ghost_clipping.norms.factor_products import FactoredGradients, Segment
from dpoptax._gradients.ghost_clipping.plan import PlannedUse, Product
from dpoptax._gradients.ghost_clipping.transformed.cotangents import FixedTerm, OuterSum
from dpoptax._gradients.ghost_clipping.transformed.point_differences import pull_back_points
from dpoptax._gradients.ghost_clipping.transformed.pull_back import FixedArrays
from dpoptax._gradients.ghost_clipping.transformed.pulled_back_norms import assemble_gradients


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
            outers += [OuterSum(segment, member.layout, product.shape) for segment in segments]
            continue
        found = pull_back_points(member.use, product.leaf, segments, fixed, differences=differences)
        outers += found[0]
        terms += found[1]
    return assemble_gradients(outers, terms, dtype)
