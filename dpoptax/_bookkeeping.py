"""The clipped sum by book-keeping: no per-example gradients where a program can be read.

One pass forward and one backward give, for each use of a parameter, the data operand and the
cotangent of its output. From them come the per-example norms, then the factors of the clip, and
one weighted contraction a parameter gives the clipped sum. Source: Bu et al., "Differentially
Private Optimization on Large Model at Small Cost", 2023; the joint norm over several gradient
points, and the reading of arbitrary programs, are this library's.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dpoptax import _products
from dpoptax._clipping import Clip, scaled_factors, square_sum, unit_gradients
from dpoptax._evaluation import evaluate_derived, run_batch, use_layout
from dpoptax._plan import Plan, Product, make_plan
from dpoptax._points import GradientPoints
from dpoptax._products import Segment
from dpoptax._tracing import Program, Use, read_program

# A squared norm below this fraction of the terms that cancelled in it is computed again, exactly.
_CANCELLED = 2.0**-13
# Formed gradients of up to so many entries are bundled: many small arrays take long to compile.
_SMALL = 2**14


@dataclasses.dataclass(frozen=True, eq=False)
class _Passes:
    """What the passes at all points gave, with the derivative along the tangent if there is one."""

    points: GradientPoints
    leaves: list[list[jax.Array]]
    operands: list[dict[int, jax.Array]]
    cotangents: list[dict[int, jax.Array]]
    gradients: list[dict[int, jax.Array]]
    tangent: tuple[list[jax.Array], dict, dict, dict] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pieces:
    """Per-example gradients: products by their segments, and formed ones, (B, entries).

    Each formed piece is the bundle of parameters that `bundles` names.
    """

    products: list[list[Segment]]
    formed: list[jax.Array]
    bundles: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})


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

    Returns (sum, aux): Σ_i mask_i clip(Σ_j w_j ∇ℓ(x_j; ξ_i)) in float32 at least, shaped like
    the parameters, and the auxiliary outputs at the first point, None without `has_aux`.
    """
    params = points.points[0]
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (batch, keys))
    program = read_program(loss_fn, params, *example, has_aux=has_aux)
    size = mask.shape[0]
    passes, results = _run(program, points, jax.tree.leaves((batch, keys)), size)
    count = len(points.points) + (points.tangent is not None)
    plan = make_plan(program, size, count)
    formed = _form(program, plan, passes)
    pieces = _Pieces(
        [_segments(product, passes) for product in plan.products],
        *_bundle(formed, clip.groups(params)),
    )
    total = _clip_and_sum(clip, params, plan, pieces, mask)
    aux = jax.tree.unflatten(program.result_tree, results)[1]
    return total, aux


def _run(program: Program, points: GradientPoints, batch: list, size: int) -> tuple[_Passes, list]:
    leaves = [jax.tree.leaves(point) for point in points.points]
    tangent = None
    outs = []
    for j, point in enumerate(leaves):
        if j == 0 and points.tangent is not None:
            direction = jax.tree.leaves(points.tangent)

            def at(leaves: list[jax.Array]) -> Any:
                return run_batch(program, leaves, batch, size)

            out, derivative = jax.jvp(at, (point,), (direction,))
            tangent = (direction, *derivative[1:])
        else:
            out = run_batch(program, point, batch, size)
        outs.append(out)
    passes = _Passes(
        points, leaves, [o[1] for o in outs], [o[2] for o in outs], [o[3] for o in outs], tangent
    )
    return passes, outs[0][0]


def _pairs(use: Use, passes: _Passes) -> list[tuple[jax.Array, jax.Array]]:
    """Operands and cotangents whose products sum to Σ_j w_j G_j (+ the tangent's part).

    Products at several points are written with the first point's operand and differences to it:
    weights that are large and cancel (DiSK's at a small gamma) then multiply small numbers.
    """
    weights, u = passes.points.weights, use.index
    operands = [o[u] for o in passes.operands]
    cotangents = [c[u] for c in passes.cotangents]
    if len(operands) == 1 and passes.tangent is None:
        return [(operands[0], _weigh(cotangents[0], weights[0]))]
    changes = None if passes.tangent is None else passes.tangent[2][u]
    lookup = jnp.issubdtype(operands[0].dtype, jnp.integer)
    if lookup and use.touched:
        first = _weigh(cotangents[0], weights[0])
        pairs = [(operands[0], first if changes is None else first + changes)]
        return pairs + [
            (o, _weigh(c, w))
            for o, c, w in zip(operands[1:], cotangents[1:], weights[1:], strict=True)
        ]
    total = sum(_weigh(c, w) for c, w in zip(cotangents, weights, strict=True))
    pairs = [(operands[0], total if changes is None else total + changes)]
    if use.touched:
        base = _widen(operands[0])
        pairs += [
            (_weigh(o.astype(base.dtype) - base, w), c)
            for o, c, w in zip(operands[1:], cotangents[1:], weights[1:], strict=True)
        ]
        if passes.tangent is not None:
            pairs.append((passes.tangent[1][u], cotangents[0]))
    return pairs


def _widen(value: jax.Array) -> jax.Array:
    return value.astype(_products.wide(value))


def _weigh(value: jax.Array, weight: Any) -> jax.Array:
    if isinstance(weight, float) and weight == 1.0:
        return value
    return _widen(value) * weight


def _segments(product: Product, passes: _Passes) -> list[Segment]:
    segments = []
    for member in product.members:
        for operand, cotangent in _pairs(member.use, passes):
            rows, columns = jax.vmap(lambda o, c, m=member: use_layout(m.use, o, c))(
                operand, _weigh(cotangent, member.scale)
            )
            segment = Segment(rows, columns)
            segment = segment if member.cut is None else member.cut(segment)
            segments.append(segment.swapped if member.swapped else segment)
    return segments


def _form(program: Program, plan: Plan, passes: _Passes) -> dict[int, jax.Array]:
    """Per-example gradients (B, ...) of the parameters that fell back, in float32."""
    total: dict[int, jax.Array] = {}

    def add(leaf: int, value: jax.Array) -> None:
        total[leaf] = total[leaf] + value if leaf in total else value

    weights = passes.points.weights
    for leaf in program.opaque:
        for gradients, weight in zip(passes.gradients, weights, strict=True):
            add(leaf, _widen(_weigh(gradients[leaf], weight)))
        if passes.tangent is not None:
            add(leaf, _widen(passes.tangent[3][leaf]))
    for use in plan.uses:
        view = use.value.view
        if view is not None:
            gradient = _form_use(use, _pairs(use, passes))
            shape = tuple(program.parameters[view.leaf].shape)
            add(view.leaf, jax.vmap(lambda g, v=view, s=shape: v.scatter(g, s))(gradient))
        else:
            for leaf, gradient in _pull_back(use, passes).items():
                add(leaf, gradient)
    return total


def _bundle(formed: dict[int, jax.Array], groups: list[int]) -> tuple[list, tuple]:
    """Formed gradients as few arrays (B, entries), the small ones of a clip group together."""
    bundles: dict[Any, list[int]] = {}
    for leaf, gradient in formed.items():
        small = math.prod(gradient.shape[1:]) <= _SMALL
        bundles.setdefault((groups[leaf], None if small else leaf), []).append(leaf)
    flat = {leaf: g.reshape(g.shape[0], -1) for leaf, g in formed.items()}
    pieces = [jnp.concatenate([flat[i] for i in bundle], axis=1) for bundle in bundles.values()]
    return pieces, tuple(map(tuple, bundles.values()))


def _form_use(use: Use, pairs: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """Per-example gradients of the value used, (B, ...) in float32, stacked like the value."""
    layout = use.layout
    segments = [Segment(*jax.vmap(lambda o, c: use_layout(use, o, c))(*pair)) for pair in pairs]
    stack = tuple(n for n, stacked in use.loops if stacked)
    gradients = _products.form(segments, layout.sizes)
    return jax.vmap(lambda g: layout.fold(g, (*stack, *use.value.aval.shape)))(gradients)


def _pull_back(use: Use, passes: _Passes) -> dict[int, jax.Array]:
    """Gradients of the parameters that a value was computed from, by the chain rule per example."""
    leaves = sorted(use.value.leaves)

    def pull(chosen: list[jax.Array], gradient: jax.Array, j: int) -> list[jax.Array]:
        def value(chosen: list[jax.Array]) -> jax.Array:
            every = list(passes.leaves[j])
            for leaf, x in zip(leaves, chosen, strict=True):
                every[leaf] = x
            return evaluate_derived(every, [use.value])[0]

        out, transpose = jax.vjp(value, chosen)
        return jax.vmap(lambda g: transpose(g.astype(out.dtype))[0])(gradient)

    total: dict[int, jax.Array] = {}
    for j, weight in enumerate(passes.points.weights):
        chosen = [passes.leaves[j][leaf] for leaf in leaves]
        operand, cotangent = passes.operands[j][use.index], passes.cotangents[j][use.index]
        gradient = _form_use(use, [(operand, cotangent)])
        if j == 0 and passes.tangent is not None:
            direction, operands, cotangents, _ = passes.tangent
            pairs = [(operand, cotangents[use.index])]
            if not jnp.issubdtype(operand.dtype, jnp.integer):
                pairs.append((operands[use.index], cotangent))
            parts, changes = jax.jvp(
                lambda c, g: pull(c, g, 0),
                (chosen, gradient),
                ([direction[leaf] for leaf in leaves], _form_use(use, pairs)),
            )
        else:
            parts, changes = pull(chosen, gradient, j), None
        for i, leaf in enumerate(leaves):
            part = _widen(_weigh(parts[i], weight))
            part = part if changes is None else part + _widen(changes[i])
            total[leaf] = total[leaf] + part if leaf in total else part
    return total


def _clip_and_sum(clip: Clip, params: Any, plan: Plan, pieces: _Pieces, mask: jax.Array) -> Any:
    """The sum of clipped gradients, shaped like the parameters.

    First with plain arithmetic, checking that it can be trusted for every example; where it
    cannot (extreme magnitudes, non-finite values, norms that are all cancellation), again with
    each example's gradient formed.
    """
    if not pieces.products and not pieces.formed:
        return jax.tree.map(_zeros, params)
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
    coefficients = scaled_factors(clip, unit, norms) / unit[:, None]
    coefficients = jnp.where(mask[:, None], coefficients, 0.0)
    keep = [g if p.method == "keep" else None for g, p in zip(kept, plan.products, strict=True)]
    fast = _sum(params, plan, pieces, [coefficients[:, groups[i]] for i in leaves], keep)

    finite = jnp.isfinite(largest)
    padding = ~mask & finite
    sound = finite & jnp.all(norms >= _CANCELLED**0.5 * bounds, axis=1)
    trusted = jnp.all((jnp.all(sizes.trusted, axis=0) & sound) | padding)

    def apart_from_zeros() -> jax.Array:
        # Gradients that are exactly zero (dead units, blank inputs) are no reason for doubt.
        fine = sizes.trusted | _vanishes(pieces)[np.array(order)]
        return jnp.all((jnp.all(fine, axis=0) & sound) | padding)

    trusted = lax.cond(trusted, lambda: trusted, apart_from_zeros)
    return lax.cond(trusted, lambda: fast, lambda: _one_by_one(clip, params, plan, pieces, mask))


def _vanishes(pieces: _Pieces) -> jax.Array:
    """Which gradients are exactly zero, (pieces, B)."""
    found = []
    for segments in pieces.products:
        rows, columns = _products.largest(segments)
        found.append((rows == 0) | (columns == 0))
    found += [jnp.all(gradient == 0, axis=1) for gradient in pieces.formed]
    return jnp.stack(found)


def _sum(params: Any, plan: Plan, pieces: _Pieces, weights: list, kept: list) -> Any:
    """Σ_i weights[piece][i] G_i, a tree like the parameters, in float32 at least."""
    leaves, structure = jax.tree.flatten(params)
    total = [_zeros(leaf) for leaf in leaves]
    for product, segments, gradient, weight in zip(
        plan.products, pieces.products, kept, weights[: len(plan.products)], strict=True
    ):
        if gradient is not None:
            part = jnp.tensordot(weight, gradient, 1)
        else:
            part = _products.weighted_sum(segments, weight, product.layout.sizes)
        part = product.layout.fold(part, product.layout.split)
        total[product.leaf] += product.view.scatter(part, product.shape)
    for bundle, gradient, weight in zip(
        pieces.bundles, pieces.formed, weights[len(plan.products) :], strict=True
    ):
        ends = np.cumsum([leaves[i].size for i in bundle])
        parts = jnp.split(jnp.tensordot(weight, gradient, 1), ends[:-1])
        for leaf, part in zip(bundle, parts, strict=True):
            total[leaf] += part.reshape(leaves[leaf].shape)
    return jax.tree.unflatten(
        structure, [t.astype(_zeros(leaf).dtype) for t, leaf in zip(total, leaves, strict=True)]
    )


def _one_by_one(clip: Clip, params: Any, plan: Plan, pieces: _Pieces, mask: jax.Array) -> Any:
    """The same sum, with one example's gradient formed after the other, a vector for each group."""
    leaves, structure = jax.tree.flatten(params)
    groups = clip.groups(params)
    members = [[i for i, g in enumerate(groups) if g == group] for group in range(1 + max(groups))]
    weights = [jnp.ones(1, jnp.float32)] * (len(pieces.products) + len(pieces.formed))
    kept = [None] * len(pieces.products)

    def add(total: list[jax.Array], inputs: tuple[_Pieces, jax.Array]) -> tuple[Any, None]:
        example, used = jax.tree.map(lambda x: x[None], inputs)
        gradient = jax.tree.leaves(_sum(params, plan, example, weights, kept))
        vectors = [jnp.concatenate([gradient[i].ravel() for i in m])[None] for m in members]
        units, scale, _ = unit_gradients(vectors, used)
        norms = jnp.sqrt(jnp.stack([square_sum(unit) for unit in units], axis=-1))
        factors = scaled_factors(clip, scale, norms)[0]
        return [t + f * u[0] for t, f, u in zip(total, factors, units, strict=True)], None

    zeros = [jnp.concatenate([_zeros(leaves[i]).ravel() for i in m]) for m in members]
    total, _ = lax.scan(add, zeros, (pieces, mask))
    sums = list(leaves)
    for vector, member in zip(total, members, strict=True):
        ends = np.cumsum([leaves[i].size for i in member])
        for i, part in zip(member, jnp.split(vector, ends[:-1]), strict=True):
            sums[i] = part.reshape(leaves[i].shape).astype(_zeros(leaves[i]).dtype)
    return jax.tree.unflatten(structure, sums)


def _zeros(leaf: Any) -> jax.Array:
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
