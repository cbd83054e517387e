"""Scales gradients of parameters that are transformed before use.

Pulling back gives the factors any magnitude, so they are divided a second time.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._ghost_clipping.norms.factor_products import FactoredGradients, Segment
from dpoptax._ghost_clipping.passes.run_passes import Passes
from dpoptax._ghost_clipping.plan import Plan, PlannedUse, Product
from dpoptax._ghost_clipping.transformed.cotangents import FixedTerm, OuterSum
from dpoptax._ghost_clipping.transformed.point_differences import pull_back_points
from dpoptax._ghost_clipping.transformed.pull_back import FixedArrays
from dpoptax._ghost_clipping.transformed.pulled_back_norms import assemble_gradients
from dpoptax._rounding.bounds import Scales


def scale_transformed(
    plan: Plan,
    passes: Passes,
    members: list[list[PlannedUse]],
    divided: list[list[Segment]],
    scales: Scales,
    *,
    differences: bool,
) -> tuple[list[FactoredGradients], Scales]:
    """Returns all products of a plan, and scales with the second divisors.

    Args:
      plan: a plan with products whose gradients are pulled back.
      passes: the recorded arrays.
      members: the uses of each product, at all points.
      divided: the factors of these uses, divided a first time.
      scales: the first divisors.
      differences: as for `scale_gradients`.
    """
    fixed, dtype = [FixedArrays(leaves) for leaves in passes.leaves], passes.factor_dtype
    products: list[FactoredGradients] = []
    again: list[tuple[int, jax.Array, jax.Array]] = []
    for i, (product, uses, segments) in enumerate(
        zip(plan.products, members, divided, strict=True)
    ):
        if product.is_pulled:
            outers, terms = _pull_back(product, uses, segments, fixed, differences=differences)
            factored, exponent, finite = assemble_gradients(outers, terms, dtype)
            again.append((i, exponent, finite))
        else:
            rounded = [segment.rounded(dtype) for segment in segments]
            factored = FactoredGradients(rounded, product.layout.sizes)
        products.append(factored)
    indices, second_exponents, kept = zip(*again, strict=True)
    at = np.array(indices)
    exponent = scales.exponent.at[at].add(jnp.stack(second_exponents))
    finite = scales.finite.at[at].min(jnp.stack(kept)[:, None])
    return products, Scales(exponent, finite)


def _pull_back(
    product: Product,
    uses: list[PlannedUse],
    divided: list[Segment],
    fixed: list[FixedArrays],
    *,
    differences: bool,
) -> tuple[list[OuterSum], list[FixedTerm]]:
    """Returns the gradients of a parameter behind used values, at all points."""
    outers: list[OuterSum] = []
    terms: list[FixedTerm] = []
    for member in product.members:
        pairs = zip(uses, divided, strict=True)
        segments = [segment for other, segment in pairs if other is member]
        if member.pull_back_counts is None:
            outers += [OuterSum(segment, member.layout, product.shape) for segment in segments]
            continue
        found = pull_back_points(member.use, product.leaf, segments, fixed, differences=differences)
        outers += found[0]
        terms += found[1]
    return outers, terms
