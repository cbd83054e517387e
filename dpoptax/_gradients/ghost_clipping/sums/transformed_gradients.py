"""Scales gradients of parameters that are transformed before use.

Pulling back gives the factors any magnitude, so they are divided a second time.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._gradients.clip.bounds import Scales
from dpoptax._gradients.ghost_clipping.norms.factor_products import FactoredGradients, Segment
from dpoptax._gradients.ghost_clipping.passes.run_passes import Passes
from dpoptax._gradients.ghost_clipping.plan import Plan, PlannedUse, Product
from dpoptax._gradients.ghost_clipping.transformed.cotangents import FixedTerm, OuterSum
from dpoptax._gradients.ghost_clipping.transformed.point_differences import pull_back_points
from dpoptax._gradients.ghost_clipping.transformed.pull_back import FixedArrays
from dpoptax._gradients.ghost_clipping.transformed.pulled_back_norms import assemble_gradients


class TransformedGradients:
    """Scales the products of a plan that has transformed ones.

    Args:
      plan: the plan.
      passes: the recorded arrays.
      differences: as for `scale_gradients`.
    """

    def __init__(self, plan: Plan, passes: Passes, differences: bool) -> None:
        self._plan, self._passes, self._differences = plan, passes, differences
        self._fixed = [FixedArrays(leaves) for leaves in passes.leaves]

    def __call__(
        self, members: list[list[PlannedUse]], divided: list[list[Segment]], scales: Scales
    ) -> tuple[list[FactoredGradients], Scales]:
        """Returns all products from their divided factors, and scales with the second divisors.

        `members` and `divided` are the uses of each product, at all points, and their factors.
        """
        products: list[FactoredGradients] = []
        again: list[tuple[int, jax.Array, jax.Array]] = []
        dtype = self._passes.factor_dtype
        parts = zip(self._plan.products, members, divided, strict=True)
        for i, (product, uses, segments) in enumerate(parts):
            if product.is_pulled:
                outers, terms = self._pull_back(product, uses, segments)
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
        self, product: Product, uses: list[PlannedUse], divided: list[Segment]
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
            found = pull_back_points(
                member.use, product.leaf, segments, self._fixed, differences=self._differences
            )
            outers += found[0]
            terms += found[1]
        return outers, terms
