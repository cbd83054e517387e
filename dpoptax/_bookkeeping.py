"""The clipped sum by book-keeping: no per-example gradients where a program can be read.

One pass forward and one backward give, for each use of a parameter, the data operand and the
cotangent of its output. From them come the per-example norms, then the factors of the clip, and
one weighted contraction a parameter gives the clipped sum. Source: Bu et al., "Differentially
Private Optimization on Large Model at Small Cost", 2023; the joint norm over several gradient
points, and the reading of arbitrary programs, are this library's.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax import _products
from dpoptax._clipping import Clip, scaled_factors
from dpoptax._one_by_one import sum_one_by_one
from dpoptax._pieces import Pieces, Sums, make_pieces, run_passes, sum_pieces, zero_sums
from dpoptax._plan import Plan, make_plan
from dpoptax._points import GradientPoints
from dpoptax._tracing import read_program

# A squared norm below this fraction of the terms that cancelled in it is computed again, exactly.
_CANCELLED = 2.0**-13
# Weights whose absolute sum is this many times their sum multiply differences, not gradients.
_LARGE_WEIGHTS = 3.0


def bookkept_sum(
    loss_fn: Any,
    clip: Clip,
    points: GradientPoints,
    batch: Any,
    mask: jax.Array,
    keys: jax.Array | None,
    *,
    has_aux: bool,
) -> tuple[Any, Any]:
    """The clipped sum of one microbatch: what `per_example_sum` returns, by book-keeping.

    Returns (sum, aux): Σ_i mask_i clip(Σ_j w_j ∇ℓ(x_j; ξ_i)), which adds up over microbatches and
    which `join_sums` gives its shape, and the auxiliary outputs at the first point, None without
    `has_aux`.
    """
    params = points.points[0]
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, keys))
    program = read_program(loss_fn, params, *example, has_aux=has_aux)
    size = mask.shape[0]
    passes, results = run_passes(program, points, jax.tree.leaves((batch, keys)), size)
    count = len(points.points) + (points.tangent is not None)
    plan = make_plan(program, size, count)

    def total_by(differences: bool) -> Any:
        pieces = make_pieces(program, plan, passes, clip.groups(params), differences=differences)
        return _clip_and_sum(clip, points.reference, params, plan, pieces, mask)

    cancel = _cancel(points.weights)
    if isinstance(cancel, jax.Array):
        total = lax.cond(cancel, lambda: total_by(True), lambda: total_by(False))
    else:
        total = total_by(bool(cancel))
    aux = jax.tree.unflatten(program.result_tree, results)[1]
    return total, aux


def join_sums(clip: Clip, params: Any, total: tuple[Sums, Any]) -> Any:
    """A clipped sum shaped like the parameters, in float32 at least, or as the geometry encodes."""
    sums, beside = total
    return clip.join(sums.tree(params), beside)


def _cancel(weights: tuple[Any, ...]) -> Any:
    """Whether the weights are large and cancel, such as DiSK's at a small gamma."""
    if len(weights) == 1:
        return False
    xp: Any = np if all(isinstance(w, float) for w in weights) else jnp
    values = xp.asarray(weights)
    return xp.sum(xp.abs(values)) > _LARGE_WEIGHTS * xp.abs(xp.sum(values))


def _clip_and_sum(
    clip: Clip, reference: Any, params: Any, plan: Plan, pieces: Pieces, mask: jax.Array
) -> tuple[Sums, Any]:
    """The sum of clipped gradients, and the sum of the geometry's statistic.

    First with plain arithmetic, checking that it can be trusted for every example; where it
    cannot (extreme magnitudes, non-finite values, norms that are all cancellation), again with
    each example's gradient formed.
    """
    scaling = clip.scaling(reference)

    def statistic(norms: jax.Array, used: jax.Array) -> Any:
        value = clip.statistic(norms, reference)
        return None if value is None else jnp.sum(jnp.where(used, value, 0.0))

    zeros = zero_sums(params, plan, pieces)
    if not pieces.products and not pieces.formed:
        return zeros, statistic(jnp.zeros(mask.shape, jnp.float32), mask)
    groups = clip.groups(params)
    kept = [
        _products.form(segments, product.layout.sizes)
        if product.method in ("keep", "form")
        else None
        for product, segments in zip(plan.products, pieces.products, strict=True)
    ]
    scales = [abs(p.view.scale) for p in plan.products] + [1.0] * len(pieces.formed)
    # Pieces in the order of the sizes: products by their terms, then all that was formed.
    by_terms = [i for i, gradient in enumerate(kept) if gradient is None]
    by_square = [i for i, gradient in enumerate(kept) if gradient is not None]
    order = [*by_terms, *by_square, *range(len(kept), len(scales))]
    leaves = [p.leaf for p in plan.products] + [bundle[0] for bundle in pieces.bundles]
    sizes = _products.combine(
        [_products.terms(pieces.products[i], plan.products[i].method) for i in by_terms],
        [_products.squares(g) for g in [*kept, *pieces.formed] if g is not None],
    )
    member_of = np.array([groups[leaves[i]] for i in order])
    membership = (np.arange(1 + max(groups))[:, None] == member_of).astype(np.float32)

    scale = np.array([scales[i] for i in order], np.float32)[:, None]
    largest = jnp.max(sizes.norms * scale, axis=0)
    unit = jnp.where(largest > 0, largest, 1.0)
    relative = scale / unit

    def grouped(values: jax.Array) -> jax.Array:
        """Root of the sum of squares by group, (B, groups), where squares alone would underflow."""
        values = values * relative
        tops = jnp.max(jnp.where(membership[:, :, None] > 0, values, 0.0), axis=1)
        tops = jnp.where(tops > 0, tops, 1.0)
        square = jnp.square(values / tops[member_of])
        return tops.T * jnp.sqrt(jnp.einsum("gp,pb->bg", membership, square, precision="highest"))

    norms, bounds = grouped(sizes.norms), grouped(sizes.bounds)
    coefficients = scaled_factors(scaling, unit, norms) / unit[:, None]
    coefficients = jnp.where(mask[:, None], coefficients, 0.0)
    keep = [g if p.method == "keep" else None for g, p in zip(kept, plan.products, strict=True)]
    weights = [coefficients[:, groups[i]] for i in leaves]

    finite = jnp.isfinite(largest)
    padding = ~mask & finite
    sound = finite & jnp.all(norms >= _CANCELLED**0.5 * bounds, axis=1)
    trusted = jnp.all((jnp.all(sizes.trusted, axis=0) & sound) | padding)

    def apart_from_zeros() -> jax.Array:
        # Gradients that are exactly zero (dead units, blank inputs) are no reason for doubt.
        fine = sizes.trusted | _vanishes(pieces)[np.array(order)]
        return jnp.all((jnp.all(fine, axis=0) & sound) | padding)

    trusted = lax.cond(trusted, lambda: trusted, apart_from_zeros)
    return lax.cond(
        trusted,
        lambda: (
            sum_pieces(zeros, plan, pieces, weights, keep),
            statistic(unit * norms[:, 0], mask),
        ),
        lambda: sum_one_by_one(scaling, statistic, groups, zeros, plan, pieces, mask),
    )


def _vanishes(pieces: Pieces) -> jax.Array:
    """Which gradients are exactly zero, (pieces, B)."""
    found = []
    if pieces.products:
        largest = jnp.stack([_products.largest(segments) for segments in pieces.products])
        found.append(jnp.any(largest == 0, axis=1))
    found += [jnp.all(gradient == 0, axis=1)[None] for gradient in pieces.formed]
    return jnp.concatenate(found)
