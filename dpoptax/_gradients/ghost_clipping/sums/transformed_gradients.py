"""Scales gradients of parameters that are transformed before use, and maps gradients.

Pulling back and mapping give the factors any magnitude, so they are divided a second time.
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

# Gradients, the exponents (B,) of their second divisor, and whether they are finite, (B,).
_DividedAgain = tuple[FactoredGradients, jax.Array, jax.Array]


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
        parts = zip(self._plan.products, members, divided, strict=True)
        for i, (product, uses, segments) in enumerate(parts):
            if product.is_transformed:
                factored, exponent, finite = self._transform(product, uses, segments)
                again.append((i, exponent, finite))
            else:
                factored = self._factored(product, segments)
            products.append(factored)
        indices, second_exponents, kept = zip(*again, strict=True)
        at = np.array(indices)
        exponent = scales.exponent.at[at].add(jnp.stack(second_exponents))
        finite = scales.finite.at[at].min(jnp.stack(kept)[:, None])
        return products, Scales(exponent, finite)

    def _transform(
        self, product: Product, uses: list[PlannedUse], segments: list[Segment]
    ) -> _DividedAgain:
        if product.is_pulled:
            outers, terms = self._pull_back(product, uses, segments)
            return assemble_gradients(outers, terms, self._passes.factor_dtype)
        linear_map, mapping = self._passes.points.linear_map, product.mapping
        assert linear_map is not None
        assert mapping is not None
        factor = linear_map.factors[product.leaf]
        assert factor is not None
        segments, exponent, finite = mapping(factor, segments)
        return self._factored(product, segments), exponent, finite

    def _factored(self, product: Product, segments: list[Segment]) -> FactoredGradients:
        rounded = [segment.rounded(self._passes.factor_dtype) for segment in segments]
        return FactoredGradients(rounded, product.layout.sizes)

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
