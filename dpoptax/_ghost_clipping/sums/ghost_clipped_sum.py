"""The clipped sum by book-keeping: no per-example gradients where a program can be read.

One pass forward and one backward give, for each use of a parameter, the data operand and the
cotangent of its output. From them come bounds of the per-example norms, then the factors of the
clip, and one weighted contraction a parameter gives the clipped sum. Source: Bu et al.,
"Differentially Private Optimization on Large Model at Small Cost", 2023; the joint norm over
several gradient points, the bounds, and the reading of arbitrary programs, are this library's.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clip import bounds
from dpoptax._clip.block_sums import Whole
from dpoptax._clip.bounds import Size
from dpoptax._clip.clip import Clip
from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.pulled_back_norms import Factored, measure_terms
from dpoptax._ghost_clipping.passes.gradient_passes import run_passes
from dpoptax._ghost_clipping.plan import Plan, Product, make_plan
from dpoptax._ghost_clipping.sums import weighted_products
from dpoptax._ghost_clipping.sums.pieces import (
    Pieces,
    Sums,
    make_pieces,
    rounding_of,
    sum_pieces,
    zero_sums,
)
from dpoptax._ghost_clipping.trace.read_program import read_program
from dpoptax._ghost_clipping.trace.zero_gradients import warn_of_vanishing
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree

# Sums of clipped gradients, and of what the geometry puts beside each.
Total: TypeAlias = tuple[Sums, jax.Array | None]

# Statistics are whole multiples, up to 2⁸ times, of one number: float32 holds the sums of so many.
_EXACT_STATISTICS = 2**16
# Weights whose absolute sum is this many times their sum multiply differences, not gradients.
_LARGE_WEIGHTS = 3.0


def bookkept_sum(
    loss_fn: Callable[..., PyTree],
    clip: Clip,
    points: GradientPoints,
    batch: PyTree,
    mask: jax.Array,
    keys: jax.Array | None,
    *,
    has_aux: bool,
    whole: Whole | None = None,
    factor_dtype: DTypeLike | None = None,
) -> tuple[Total, PyTree]:
    """The clipped sum of one microbatch: what `per_example_sum` returns, by book-keeping.

    Returns (sum, aux): Σ_i mask_i clip(Σ_j w_j ∇ℓ(x_j; ξ_i)), which adds up over microbatches and
    which `join_sums` gives its shape, and the auxiliary outputs at the first point, None without
    `has_aux`. `whole` is the batch of all microbatches and devices, `None` where this is it.
    Factors are rounded to `factor_dtype` where it is not None.
    """
    params = points.points[0]
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, keys))
    tangent = points.tangent is not None
    program = read_program(loss_fn, params, *example, has_aux=has_aux, tangent=tangent)
    warn_of_vanishing(program, params)
    size = mask.shape[0]
    passes, results = run_passes(program, points, jax.tree.leaves((batch, keys)), size)
    plan = make_plan(program, size, len(points.points), points.linear_map, tangent=tangent)

    def total_by(differences: bool) -> Total:
        pieces = make_pieces(
            program,
            plan,
            passes,
            clip.groups(params),
            differences=differences,
            factor_dtype=factor_dtype,
        )
        return _clip_and_sum(
            clip, points.reference, params, plan, pieces, mask, whole or Whole(size)
        )

    cancel = _cancel(points.weights)
    if isinstance(cancel, jax.Array):  # a branch on public numbers
        total = lax.cond(cancel, lambda: total_by(True), lambda: total_by(False))
    else:
        total = total_by(bool(cancel))
    aux = jax.tree.unflatten(program.result_tree, results)[1]
    return total, aux


def join_sums(clip: Clip, params: PyTree, total: Total) -> PyTree:
    """A clipped sum shaped like the parameters, in float32 at least, or as the geometry encodes."""
    sums, beside = total
    return clip.join(sums.tree(params), beside)


def _cancel(weights: tuple[float | jax.Array, ...]) -> bool | np.bool | jax.Array:
    """Whether the weights are large and cancel, such as DiSK's at a small gamma."""
    if len(weights) == 1:
        return False
    xp: Any = np if all(isinstance(w, float) for w in weights) else jnp
    values = xp.asarray(weights)
    return xp.sum(xp.abs(values)) > _LARGE_WEIGHTS * xp.abs(xp.sum(values))


def _clip_and_sum(
    clip: Clip,
    reference: PyTree,
    params: PyTree,
    plan: Plan,
    pieces: Pieces,
    mask: jax.Array,
    whole: Whole,
) -> Total:
    """The sum of clipped gradients, and the sum of the geometry's statistic."""

    def statistic(norms: jax.Array, used: jax.Array) -> jax.Array | None:
        value = clip.statistic(norms, reference)
        if value is None:
            return None
        if whole.examples > _EXACT_STATISTICS:
            raise ValueError(
                f"{clip} counts up to {_EXACT_STATISTICS} examples exactly, and this batch has "
                f"{whole.examples}: take smaller batches, or method='vmap', whose bound has the "
                "rounding of the count"
            )
        return jnp.sum(jnp.where(used, value, 0.0))

    zeros = zero_sums(params, plan, pieces)
    if pieces.scales is None:
        return zeros, statistic(jnp.zeros(mask.shape, jnp.float32), mask)
    scaling = clip.scaling(reference)
    sizes = [measure(*pair) for pair in zip(plan.products, pieces.products, strict=True)]
    groups = clip.groups(params)
    leaves = [p.leaf for p in plan.products] + [bundle[0] for bundle in pieces.bundles]
    segments = [segment for piece in pieces.products for segment in piece.segments]
    weights, norms, used = bounds.coefficients(
        scaling,
        pieces.scales,
        sizes + pieces.sizes,
        [groups[leaf] for leaf in leaves],
        mask,
        layers=1 + max(groups),
        ratios=[weighted_products.ratio_of(piece) for piece in pieces.products]
        + [1.0] * len(pieces.sizes),
        sum_error=weighted_products.sum_error(segments),
        rounding=rounding_of(plan, pieces, whole),
    )
    total = sum_pieces(
        zeros, plan, pieces, weights, bound=scaling.sensitivity, examples=whole.examples
    )
    return total, statistic(norms, used)


def measure(product: Product, piece: Factored) -> Size:
    """The size of a product's gradients."""
    sizes = product.layout.sizes
    if piece.terms:
        return measure_terms(piece, sizes)
    if product.method == "form":
        return factor_products.measure_formed(piece.segments, sizes)
    return factor_products.measure(piece.segments, sizes, product.method)
