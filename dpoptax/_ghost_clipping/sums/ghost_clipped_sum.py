"""Computes the clipped sum by ghost clipping.

One forward and one backward pass give the data operand and the cotangent of each use of a
parameter. These give bounds on the per-example norms, and the norms give the coefficients of the
clip. One weighted contraction for each parameter then gives the clipped sum.

Source: Bu et al., "Differentially Private Optimization on Large Model at Small Cost", 2023. The
joint norm over several gradient points, the bounds on rounding, and the support for arbitrary
programs are new here.
"""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clips.clip import Clip
from dpoptax._ghost_clipping import sums
from dpoptax._ghost_clipping.make_plan import make_plan
from dpoptax._ghost_clipping.plan import unweighted_sides
from dpoptax._ghost_clipping.records.record_points import record_points
from dpoptax._ghost_clipping.sums.example_gradients import ExampleGradients, collect_gradients
from dpoptax._losses.trace_loss import Examples
from dpoptax._losses.traced_program import Program
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import block_sums, bounds
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._rounding.bounds import FLOAT32_ERROR, Piece
from dpoptax._support.tree import PyTree, float32_at_least
from dpoptax._support.xla import opaque_integers

# Sums of clipped gradients, by the parameters that they are of, in few arrays, since many arrays
# take long to compile.
GradientSums: TypeAlias = dict[tuple[int, ...], jax.Array]
# These sums, and the sum of the geometry's statistic if it has one.
ClippedTotal: TypeAlias = tuple[GradientSums, jax.Array | None]

# Weights multiply differences of gradients if Σ |w_j| exceeds this many times |Σ w_j|.
_CANCELLATION_RATIO = 3.0


def ghost_clipped_sum(
    program: Program,
    clip: Clip,
    points: GradientPoints,
    examples: Examples,
    *,
    factor_dtype: DTypeLike | None = None,
    bundled_size: int = 0,
) -> tuple[ClippedTotal, PyTree]:
    """Computes the clipped sum of one micro-batch.

        Σ_i mask_i clip(Σ_j w_j ∇ℓ(x_j; ξ_i))

    Args:
      program: the loss of one example.
      clip: the geometry.
      points: the gradient points x_j and their weights w_j.
      examples: the examples ξ_i, with mask_i.
      factor_dtype: the dtype that factors are rounded to; `None` for no rounding.
      bundled_size: the size of the largest formed gradients that share an array with others.

    Returns:
      The sum and the auxiliary outputs at the first point, `None` without `has_aux`. The sums of
      micro-batches can be added, and `join_sums` shapes the total like the parameters.
    """
    cancel = _may_cancel(points)
    plan = make_plan(program, len(examples.mask), len(points.points))
    records = record_points(
        program,
        points,
        examples.inputs,
        factor_dtype=factor_dtype,
        formed_uses=plan.formed_uses,
        finite=unweighted_sides(plan),
        early=not cancel,
    )
    groups = clip.groups(points.points[0])
    gradients = collect_gradients(
        plan, records, groups, differences=cancel, bundled_size=bundled_size
    )
    total = clip_and_sum(clip, points, gradients, examples.mask, examples.whole)
    return total, program.loss.aux(records.at_points[0].outputs)


def join_sums(clip: Clip, params: PyTree, total: ClippedTotal) -> PyTree:
    """Returns a sum shaped like the parameters, or as the clip encodes it."""
    by_bundle, statistic = total
    leaves, structure = jax.tree.flatten(params)
    found: dict[int, jax.Array] = {}
    for bundle, vector in by_bundle.items():
        found |= zip(bundle, _unbundle(vector, [leaves[i] for i in bundle]), strict=True)
    kinds = map(float32_at_least, leaves)
    whole = [
        found[i].astype(kind) if i in found else jnp.zeros(leaf.shape, kind)
        for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
    ]
    return clip.join(jax.tree.unflatten(structure, whole), statistic)


def _may_cancel(points: GradientPoints) -> bool:
    """Returns whether the weights may be large and cancel, as for DiSK with small gamma.

    They then multiply differences of gradients.
    """
    weights = points.weights
    return sum(map(abs, weights)) > _CANCELLATION_RATIO * abs(sum(weights))


def clip_and_sum(
    clip: Clip,
    points: GradientPoints,
    gradients: ExampleGradients,
    mask: jax.Array,
    whole: WholeBatch,
) -> ClippedTotal:
    """Returns the sum of clipped gradients, and the sum of the geometry's statistic."""
    reference = points.reference
    if not (gradients.products or gradients.formed):
        nothing = jnp.zeros(mask.shape, jnp.float32)
        return {}, bounds.sum_statistic(clip, reference, nothing, mask, whole.examples)
    # For `l2_clip`, `scaled` is the clip itself and its statistic is `None`.
    scaled, groups = clip.scaling(reference), clip.groups(points.points[0])
    pieces, tau = make_pieces(gradients, groups), sum_rounding(gradients, whole)
    by_piece, norms, used = bounds.clip_coefficients(scaled, pieces, mask, groups=groups, tau=tau)
    total: GradientSums = {}
    products, options = gradients.products, (scaled.sensitivity, whole.examples)
    parts = sums.product_sums.sum_each(products, by_piece, *options) if products else ()
    for product, part in zip(gradients.plan.products, parts, strict=True):
        leaf, placed = (product.leaf,), product.place(part)
        # Products of one parameter share no entry (`make_plan`), so that adding the placed sums is
        # exact.
        total[leaf] = total[leaf] + placed if leaf in total else placed
    formed = zip(gradients.formed.items(), by_piece[len(products) :], strict=True)
    total |= {leaves: block_sums.sum_weighted(each, x) for (leaves, x), each in formed}
    return total, bounds.sum_statistic(clip, reference, norms, used, whole.examples)


def make_pieces(gradients: ExampleGradients, groups: list[int]) -> list[Piece]:
    """Returns the pieces of each example's gradient: first products, then bundles."""
    products, planned = gradients.products, gradients.plan.products
    pieces = sums.product_sums.product_pieces(products, planned, groups) if products else []
    for (leaf, *_), formed in gradients.formed.items():
        size = bounds.formed_bounds(formed)
        pieces.append(Piece(size, groups[leaf], sum_error=FLOAT32_ERROR))
    return pieces


def sum_rounding(gradients: ExampleGradients, whole: WholeBatch) -> float:
    """Returns τ of the clipped sum over all parts of a batch."""
    products = gradients.products
    roundings = [sums.product_sums.product_rounding(each, whole.examples) for each in products]
    return block_sums.tau(whole, roundings)


def _unbundle(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Splits a vector into arrays with the shapes of `like`. One array may be in its shape."""
    if len(like) == 1:
        return [vector.reshape(like[0].shape)]
    ends = np.cumsum([x.size for x in like])
    # With constant indices, XLA would compile a kernel for each slice, which is slow.
    starts = opaque_integers([int(end) - x.size for end, x in zip(ends, like, strict=True)])
    part = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
    return [
        part(vector, (start,), (x.size,)).reshape(x.shape)
        for start, x in zip(starts, like, strict=True)
    ]
