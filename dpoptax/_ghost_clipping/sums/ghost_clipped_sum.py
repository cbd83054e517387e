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

from dpoptax._clip import block_sums, bounds
from dpoptax._clip.block_sums import WholeBatch
from dpoptax._clip.bounds import NormBounds, Piece
from dpoptax._clip.clip import Clip
from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.factor_products import FactoredGradients
from dpoptax._ghost_clipping.passes.run_passes import run_passes
from dpoptax._ghost_clipping.plan import Plan, Product, make_plan
from dpoptax._ghost_clipping.sums.formed_gradients import unbundle
from dpoptax._ghost_clipping.sums.scaled_gradients import ScaledGradients, scale_gradients
from dpoptax._ghost_clipping.sums.weighted_products import (
    FLOAT32_ERROR,
    absolute_ratio,
    product_rounding,
    sum_error,
    sum_products,
)
from dpoptax._ghost_clipping.trace.program import Program
from dpoptax._ghost_clipping.trace.trace_loss import Examples
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree, float32_at_least
from dpoptax._xla import unstack


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
        total = [
            self.leaf_sums.get(i, _zeros(leaf, self.integers)) for i, leaf in enumerate(leaves)
        ]
        for bundle, vector in zip(self.bundles, self.vectors, strict=True):
            for i, part in zip(bundle, unbundle(vector, [leaves[i] for i in bundle]), strict=True):
                total[i] = part.astype(total[i].dtype)
        return jax.tree.unflatten(structure, total)

    @classmethod
    def from_tree(cls, total: PyTree) -> "GradientSums":
        """Returns sums that already have the shapes of the parameters."""
        return cls(dict(enumerate(jax.tree.leaves(total))), [], ())


# Sums of clipped gradients, and of the geometry's statistic if it has one.
ClippedTotal: TypeAlias = tuple[GradientSums, jax.Array | None]
# The last stage of a sum: measures, clips and adds gradients.
ClipAndSum: TypeAlias = Callable[..., ClippedTotal]

# Statistics are multiples of one number, up to 2⁸ times it: float32 holds such sums exactly.
_STATISTIC_EXAMPLES = 2**16
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

    cancel = _weights_cancel(points.weights)
    if isinstance(cancel, jax.Array):  # a branch on public numbers
        total = lax.cond(cancel, lambda: make_total(True), lambda: make_total(False))
    else:
        total = make_total(bool(cancel))
    return total, program.loss.aux(passes.at_points[0].outputs)


def join_sums(clip: Clip, params: PyTree, total: ClippedTotal) -> PyTree:
    """Returns a sum shaped like the parameters, or as the clip encodes it."""
    sums, statistic = total
    return clip.join(sums.tree(params), statistic)


def _weights_cancel(weights: tuple[float | jax.Array, ...]) -> bool | np.bool | jax.Array:
    """Returns whether the weights are large and cancel, as for DiSK with small gamma."""
    if len(weights) == 1:
        return False
    xp: Any = np if all(isinstance(w, float) for w in weights) else jnp
    values = xp.asarray(weights)
    return xp.sum(xp.abs(values)) > _CANCELLATION_RATIO * xp.abs(xp.sum(values))


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
    zeros = zero_sums(params, plan, gradients)
    if gradients.scales is None:
        nothing = jnp.zeros(mask.shape, jnp.float32)
        return zeros, sum_statistic(clip, reference, nothing, mask, whole)
    # For `l2_clip`, `scaling` returns the clip itself and `statistic` returns `None`.
    scaling, groups = clip.scaling(reference), clip.groups(params)
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
        scaling,
        gradients.scales,
        pieces,
        mask,
        group_count=1 + max(groups),
        tau=sum_rounding(gradients, whole),
    )
    total = _sum_weighted_gradients(
        zeros, plan, gradients, coefficients, bound=scaling.sensitivity, examples=whole.examples
    )
    return total, sum_statistic(clip, reference, norms, used, whole)


def sum_statistic(
    clip: Clip, reference: PyTree, norms: jax.Array, used: jax.Array, whole: WholeBatch
) -> jax.Array | None:
    """Returns the sum of the geometry's statistic over used examples, if it has one."""
    value = clip.statistic(norms, reference)
    if value is None:
        return None
    if whole.examples > _STATISTIC_EXAMPLES:
        raise ValueError(
            f"A batch must have at most {_STATISTIC_EXAMPLES} examples for {clip} to count them "
            f"exactly, got {whole.examples}. Use smaller batches, or method='vmap', which includes "
            "the rounding of the count in its bound."
        )
    return jnp.sum(jnp.where(used, value, 0.0))


def measure_product(product: Product, factored: FactoredGradients) -> NormBounds:
    """Returns upper bounds of ‖G‖² and S of a product's gradients."""
    if factored.terms:
        from dpoptax._ghost_clipping.transformed.pulled_back_norms import measure_terms

        return measure_terms(factored)
    if product.method == "form":
        return factor_products.measure_formed(factored.segments, factored.sizes)
    return factor_products.measure(factored.segments, factored.sizes, product.method)


def zero_sums(
    params: PyTree, plan: Plan, gradients: ScaledGradients, *, integers: bool = False
) -> GradientSums:
    """Returns the initial value of sums of gradients."""
    leaves = jax.tree.leaves(params)
    leaf_sums = {product.leaf: _zeros(leaves[product.leaf], integers) for product in plan.products}
    vectors = [
        jnp.zeros(g.shape[1:], jnp.int32 if integers else float32_at_least(g))
        for g in gradients.formed
    ]
    return GradientSums(leaf_sums, vectors, gradients.bundles, integers)


def _sum_weighted_gradients(
    start: GradientSums,
    plan: Plan,
    gradients: ScaledGradients,
    coefficients: jax.Array,
    *,
    bound: float,
    examples: int,
) -> GradientSums:
    """Returns start + Σ_i coefficients[piece][i] G_i.

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
    return add_sums(start, plan, parts, vectors)


def add_sums(
    start: GradientSums, plan: Plan, parts: list[jax.Array], vectors: list[jax.Array]
) -> GradientSums:
    """Adds the sums of products, (K, R, D), and of bundles."""
    leaf_sums = dict(start.leaf_sums)
    for product, part in zip(plan.products, parts, strict=True):
        view = dataclasses.replace(product.view, scale=1.0)  # the factors include the scale
        part = view.scatter(product.layout.fold(part, product.layout.split), product.shape)
        total = leaf_sums[product.leaf]
        leaf_sums[product.leaf] = (total + part).astype(total.dtype)
    vectors = list(map(jnp.add, start.vectors, vectors))
    return dataclasses.replace(start, leaf_sums=leaf_sums, vectors=vectors)


def sum_rounding(gradients: ScaledGradients, whole: WholeBatch) -> float:
    """Returns τ of the clipped sum over all parts of a batch."""
    products = gradients.products
    return block_sums.tau(whole, [product_rounding(each, whole.examples) for each in products])


def _zeros(leaf: jax.Array, integers: bool) -> jax.Array:
    """Returns the initial value of the sum of a parameter's gradients."""
    return jnp.zeros(leaf.shape, jnp.int32 if integers else float32_at_least(leaf))
