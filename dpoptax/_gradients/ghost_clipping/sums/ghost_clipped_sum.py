"""Computes the clipped sum by ghost clipping.

One forward and one backward pass give the data operand and the cotangent of each use of a
parameter. These give bounds on the per-example norms, and the norms give the coefficients of the
clip. One weighted contraction for each parameter then gives the clipped sum.

Source: Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023. The
joint norm over several gradient points, the bounds on rounding, and the support for arbitrary
programs are new here.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpoptax._gradients.clip import block_sums, bounds
from dpoptax._gradients.clip.block_sums import WholeBatch, sum_statistic
from dpoptax._gradients.clip.bounds import Piece
from dpoptax._gradients.clip.clip import Clip
from dpoptax._gradients.clip.encoding import join, scaling
from dpoptax._gradients.ghost_clipping.passes.run_passes import run_passes
from dpoptax._gradients.ghost_clipping.plan import Plan, make_plan
from dpoptax._gradients.ghost_clipping.sums.formed_gradients import unbundle
from dpoptax._gradients.ghost_clipping.sums.scaled_gradients import ScaledGradients, scale_gradients
from dpoptax._gradients.ghost_clipping.sums.weighted_products import (
    FLOAT32_ERROR,
    absolute_ratio,
    measure_product,
    product_rounding,
    sum_error,
    sum_products,
)
from dpoptax._gradients.ghost_clipping.trace.program import Program
from dpoptax._gradients.ghost_clipping.trace.trace_loss import Examples
from dpoptax._gradients.points import GradientPoints
from dpoptax._support.tree import PyTree, float32_at_least
from dpoptax._support.xla import unstack


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GradientSums:
    """Holds sums of gradients in few arrays, since many arrays take long to compile.

    Attributes:
      leaf_sums: the sums of parameters whose gradients are products.
      vectors: for each of `bundles`, the sums of its parameters in one array.
      integers: whether sums are integers, in units of a grid.
    """

    leaf_sums: dict[int, jax.Array]
    vectors: list[jax.Array]
    bundles: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    integers: bool = dataclasses.field(default=False, metadata={"static": True})

    def tree(self, params: PyTree) -> PyTree:
        """Returns the sums as a tree like the parameters, in float32 at least, or in int32."""
        leaves, structure = jax.tree.flatten(params)
        found = dict(self.leaf_sums)
        for bundle, vector in zip(self.bundles, self.vectors, strict=True):
            found |= zip(bundle, unbundle(vector, [leaves[i] for i in bundle]), strict=True)
        kinds = [jnp.int32 if self.integers else float32_at_least(leaf) for leaf in leaves]
        total = [
            found[i].astype(kind) if i in found else jnp.zeros(leaf.shape, kind)
            for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
        ]
        return jax.tree.unflatten(structure, total)

    @classmethod
    def from_tree(cls, total: PyTree) -> "GradientSums":
        """Returns sums that already have the shapes of the parameters."""
        return cls(dict(enumerate(jax.tree.leaves(total))), [], ())


# Sums of clipped gradients, and of the geometry's statistic if it has one.
ClippedTotal: TypeAlias = tuple[GradientSums, jax.Array | None]
# The last stage of a sum: measures, clips and adds gradients.
ClipAndSum: TypeAlias = Callable[..., ClippedTotal]

# Weights multiply differences of gradients if Σ |w_j| exceeds this many times |Σ w_j|.
_CANCELLATION_RATIO = 3.0


def ghost_clipped_sum(
    program: Program,
    clip: Clip,
    points: GradientPoints,
    examples: Examples,
    *,
    factor_dtype: DTypeLike | None = None,
    clip_and_sum: ClipAndSum | None = None,
) -> tuple[ClippedTotal, PyTree]:
    """Computes the clipped sum of one micro-batch.

        Σ_i mask_i clip(Σ_j w_j ∇ℓ(x_j; ξ_i))

    Args:
      program: the loss of one example.
      clip: the geometry.
      points: the gradient points x_j and their weights w_j.
      examples: the examples ξ_i, with mask_i.
      factor_dtype: the dtype that factors are rounded to; `None` for no rounding.
      clip_and_sum: the last stage; `None` for sums of floats.

    Returns:
      The sum and the auxiliary outputs at the first point, `None` without `has_aux`. The sums of
      micro-batches can be added, and `join_sums` shapes the total like the parameters.
    """
    mask, finish = program.loss.separate(examples.mask), clip_and_sum or sum_floats
    plan = make_plan(
        program,
        examples.mask.shape[0],
        len(points.points),
        points.linear_map,
        has_tangent=points.tangent is not None,
    )
    passes = run_passes(program, points, examples.inputs, factor_dtype=factor_dtype)
    groups = clip.groups(points.points[0])

    def make_total(differences: bool) -> ClippedTotal:
        gradients = scale_gradients(program, plan, passes, groups, differences=differences)
        return finish(clip, points, plan, gradients, mask, examples.whole)

    several = len(points.weights) > 1
    total = _total_of_points(points, make_total) if several else make_total(False)
    return total, program.loss.aux(passes.at_points[0].outputs)


def join_sums(clip: Clip, params: PyTree, total: ClippedTotal) -> PyTree:
    """Returns a sum shaped like the parameters, or as the clip encodes it."""
    sums, statistic = total
    return join(clip, sums.tree(params), statistic)


def _total_of_points(
    points: GradientPoints, make_total: Callable[[bool], ClippedTotal]
) -> ClippedTotal:
    """Returns `make_total(differences)`, with differences if the weights are large and cancel.

    This is the case for DiSK with small gamma. Weights may be traced; they are public.
    """
    xp: Any = np if all(isinstance(w, float) for w in points.weights) else jnp
    values = xp.asarray(points.weights)
    cancel = xp.sum(xp.abs(values)) > _CANCELLATION_RATIO * xp.abs(xp.sum(values))
    if isinstance(cancel, jax.Array):
        return lax.cond(cancel, lambda: make_total(True), lambda: make_total(False))
    return make_total(bool(cancel))


def sum_floats(
    clip: Clip,
    points: GradientPoints,
    plan: Plan,
    gradients: ScaledGradients,
    mask: jax.Array,
    whole: WholeBatch,
) -> ClippedTotal:
    """Returns the sum of clipped gradients, and the sum of the geometry's statistic."""
    params, reference = points.points[0], points.reference
    if gradients.scales is None:
        nothing = jnp.zeros(mask.shape, jnp.float32)
        return GradientSums({}, [], ()), sum_statistic(clip, reference, nothing, mask, whole)
    # For `l2_clip`, `scaled` is the clip itself and its statistic is `None`.
    scaled, groups = scaling(clip, reference), clip.groups(params)
    pieces = [
        Piece(
            measure_product(product, factored),
            groups[product.leaf],
            absolute_ratio(factored),
            sum_error(factored),
        )
        for product, factored in zip(plan.products, gradients.products, strict=True)
    ]
    pieces += [
        Piece(norm_bounds, groups[bundle[0]], sum_error=FLOAT32_ERROR)
        for norm_bounds, bundle in zip(gradients.norm_bounds, gradients.bundles, strict=True)
    ]
    coefficients, norms, used = bounds.clip_coefficients(
        scaled,
        gradients.scales,
        pieces,
        mask,
        group_count=1 + max(groups),
        tau=sum_rounding(gradients, whole),
    )
    total = _sum_weighted_gradients(
        plan, gradients, coefficients, bound=scaled.sensitivity, examples=whole.examples
    )
    return total, sum_statistic(clip, reference, norms, used, whole)


def _sum_weighted_gradients(
    plan: Plan,
    gradients: ScaledGradients,
    coefficients: jax.Array,
    *,
    bound: float,
    examples: int,
) -> GradientSums:
    """Returns Σ_i coefficients[piece][i] G_i.

    The summands have norms of at most `bound`. `examples` is the size of the whole batch, which
    determines the blocks.
    """
    (by_piece,) = unstack(coefficients)
    of_products, of_formed = by_piece[: len(plan.products)], by_piece[len(plan.products) :]
    parts = [
        sum_products(factored, each, bound=bound, examples=examples)
        for factored, each in zip(gradients.products, of_products, strict=True)
    ]
    vectors = [
        block_sums.sum_weighted(each, gradient)
        for gradient, each in zip(gradients.formed, of_formed, strict=True)
    ]
    return place_sums(plan, gradients, parts, vectors)


def place_sums(
    plan: Plan,
    gradients: ScaledGradients,
    parts: list[jax.Array],
    vectors: list[jax.Array],
    *,
    integers: bool = False,
) -> GradientSums:
    """Returns sums of products, (K, R, D), and of bundles, in the places of their parameters."""
    found: dict[int, jax.Array] = {}
    for product, part in zip(plan.products, parts, strict=True):
        view = dataclasses.replace(product.view, scale=1.0)  # the factors include the scale
        part = view.scatter(product.layout.fold(part, product.layout.split), product.shape)
        found[product.leaf] = found[product.leaf] + part if product.leaf in found else part
    return GradientSums(found, vectors, gradients.bundles, integers)


def sum_rounding(gradients: ScaledGradients, whole: WholeBatch) -> float:
    """Returns τ of the clipped sum over all parts of a batch."""
    products = gradients.products
    return block_sums.tau(whole, [product_rounding(each, whole.examples) for each in products])
