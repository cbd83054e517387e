"""Per-example gradients as a run leaves them: as products of factors, or formed."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpoptax._bookkeeping import products as _products
from dpoptax._bookkeeping.plan import Member, Plan, Product
from dpoptax._bookkeeping.products import Segment
from dpoptax._bookkeeping.program import Program, Use
from dpoptax._bookkeeping.running import ByIndex, Passed, evaluate_derived, run_batch, use_layout
from dpoptax._clips import bounds
from dpoptax._clips.bounds import Scales, Size
from dpoptax._points import GradientPoints, weigh
from dpoptax._trees import PyTree

# An operand, a cotangent, and the weight of their product.
Pair: TypeAlias = tuple[jax.Array, jax.Array, float | jax.Array]

# A use, its operand, and its cotangent times the weight.
Factors: TypeAlias = tuple[Member, jax.Array, jax.Array]

# Formed gradients of up to so many entries are bundled: many small arrays take long to compile.
# Found by hand on one x86 CPU; no command of the benchmarks repeats it.
_BUNDLED_ENTRIES = 2**10


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of gradients, in few arrays: many small ones take long to compile.

    Attributes:
      by_leaf: those of the parameters of products.
      vectors: for each of `bundles`, its parameters' side by side.
    """

    by_leaf: dict[int, jax.Array]
    vectors: list[jax.Array]
    bundles: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})

    def tree(self, params: PyTree) -> PyTree:
        """The sums as a tree like the parameters, in float32 at least."""
        leaves, structure = jax.tree.flatten(params)
        total = [self.by_leaf.get(i, _wide_zeros(leaf)) for i, leaf in enumerate(leaves)]
        for bundle, vector in zip(self.bundles, self.vectors, strict=True):
            for i, part in zip(bundle, unbundle(vector, [leaves[i] for i in bundle]), strict=True):
                total[i] = part.astype(total[i].dtype)
        return jax.tree.unflatten(structure, total)


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """What the passes at all points gave, with the derivative along the tangent if there is one."""

    points: GradientPoints
    leaves: list[list[jax.Array]]
    operands: list[ByIndex]
    cotangents: list[ByIndex]
    gradients: list[ByIndex]
    tangent: tuple[list[jax.Array], ByIndex, ByIndex, ByIndex] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """Per-example gradients over powers of two: products first, then formed ones.

    Attributes:
      products: the factors of each, of which no entry is above 4.
      formed: (B, entries) each, the parameters of a bundle side by side.
      sizes: those of `formed`.
      scales: what all were divided by; `None` where there are none.
      bundles: the parameters in each of `formed`.
    """

    products: list[list[Segment]]
    formed: list[jax.Array]
    sizes: list[Size]
    scales: Scales | None
    bundles: tuple[tuple[int, ...], ...]


def run_passes(
    program: Program, points: GradientPoints, batch: list[jax.Array], size: int
) -> tuple[Passes, list[jax.Array]]:
    """Runs a program forward and backward at all points; also gives the results at the first."""
    leaves = [jax.tree.leaves(point) for point in points.points]
    tangent = None
    outs = []
    for j, point in enumerate(leaves):
        if j == 0 and points.tangent is not None:
            direction = jax.tree.leaves(points.tangent)

            def at(leaves: list[jax.Array]) -> Passed:
                return run_batch(program, leaves, batch, size)

            out, derivative = jax.jvp(at, (point,), (direction,))
            tangent = (direction, *derivative[1:])
        else:
            out = run_batch(program, point, batch, size)
        outs.append(out)
    passes = Passes(
        points, leaves, [o[1] for o in outs], [o[2] for o in outs], [o[3] for o in outs], tangent
    )
    return passes, outs[0][0]


def make_pieces(
    program: Program,
    plan: Plan,
    passes: Passes,
    groups: list[int],
    *,
    differences: bool,
    factor_dtype: DTypeLike | None,
) -> Pieces:
    """The per-example gradients Σ_j w_j G_j (+ the tangent's part), by parameter.

    With `differences`, products at several points are written with the first point's operand and
    differences to it, X_0ᵀ Σ_j w_j D_j + Σ_j w_j (X_j − X_0)ᵀ D_j: weights that are large and
    cancel then multiply small numbers. It takes more passes over memory. `factor_dtype` is what
    factors are rounded to, `None` for no rounding: from then on they are what is clipped.
    """
    formed, bundles = _bundle(_form(program, plan, passes), groups)
    factors = [_factors(product, passes, differences) for product in plan.products]
    tops = [_tops(product) for product in factors]
    tops += [jnp.stack([top, jnp.ones_like(top)]) for top in map(bounds.top, formed)]
    if not tops:
        return Pieces([], [], [], None, ())
    scales = bounds.scales(tops)
    inverse, finite = scales.inverse, scales.finite
    products = [
        [_factored(*use, inverse[i], finite[i], factor_dtype) for use in product]
        for i, product in enumerate(factors)
    ]
    count = len(products)
    sized = [
        bounds.formed(x, inverse[count + i, 0], finite[count + i]) for i, x in enumerate(formed)
    ]
    return Pieces(products, [x for x, _ in sized], [size for _, size in sized], scales, bundles)


def _pairs(use: Use, passes: Passes, differences: bool) -> list[Pair]:
    """Operands, cotangents and weights whose products sum to the gradient of a use."""
    weights, u = passes.points.weights, use.index
    operands = [o[u] for o in passes.operands]
    cotangents = [c[u] for c in passes.cotangents]
    pairs = list(zip(operands, cotangents, weights, strict=True))
    lookup = jnp.issubdtype(operands[0].dtype, jnp.integer)
    if len(pairs) > 1 and (not use.operand_varies or (differences and not lookup)):
        total = weigh(cotangents[0], weights[0])
        for cotangent, weight in zip(cotangents[1:], weights[1:], strict=True):
            total += weigh(cotangent, weight)
        first = _widen(operands[0]) if use.operand_varies else operands[0]
        others = pairs[1:] if use.operand_varies else []
        pairs = [(operands[0], total, 1.0), *((_widen(o) - first, c, w) for o, c, w in others)]
    if passes.tangent is not None:
        _, changed, changes, _ = passes.tangent
        operand, cotangent, weight = pairs[0]
        pairs[0] = (operand, weigh(cotangent, weight) + changes[u], 1.0)
        if use.operand_varies and not lookup:
            pairs.append((changed[u], cotangents[0], 1.0))
    return pairs


def _widen(value: jax.Array) -> jax.Array:
    return value.astype(_products.wide(value))


def _factors(product: Product, passes: Passes, differences: bool) -> list[Factors]:
    """What a product is of, use by use and point by point, as it is."""
    return [
        (member, operand, weigh(cotangent, weight, member.view.scale))
        for member in product.members
        for operand, cotangent, weight in _pairs(member.use, passes, differences)
    ]


def _tops(factors: list[Factors]) -> jax.Array:
    """The largest entries of operands and of cotangents, (2, B)."""
    of_cotangents = [bounds.top(cotangent) for _, _, cotangent in factors]
    ones = jnp.ones_like(of_cotangents[0])
    of_operands = [bounds.top(o) if _scales(member.use, o) else ones for member, o, _ in factors]
    return jnp.stack([functools.reduce(jnp.maximum, side) for side in (of_operands, of_cotangents)])


def _factored(
    member: Member,
    operand: jax.Array,
    cotangent: jax.Array,
    inverse: jax.Array,
    finite: jax.Array,
    dtype: DTypeLike | None,
) -> Segment:
    """The factors of one use, each side over a power of two of the example's own."""
    of_operands, of_cotangents = inverse
    cotangent = bounds.divide(cotangent, of_cotangents, finite)
    if _scales(member.use, operand):
        operand = bounds.divide(operand, of_operands, finite)
    else:
        cotangent = bounds.divide(cotangent, of_operands, finite)
    segment = _segment(member, operand, cotangent)
    return segment if dtype is None else _rounded(segment, dtype)


def _scales(use: Use, operand: jax.Array) -> bool:
    """Whether an operand's magnitude goes into its factor: one-hot ones and a shift's are as is."""
    return use.rule.reads_data and not jnp.issubdtype(operand.dtype, jnp.integer)


def _segment(member: Member, operand: jax.Array, cotangent: jax.Array) -> Segment:
    segment = Segment(*jax.vmap(lambda o, c: use_layout(member.use, o, c))(operand, cotangent))
    segment = segment if member.cut is None else member.cut(segment)
    return segment.swapped if member.swapped else segment


def _rounded(segment: Segment, dtype: DTypeLike) -> Segment:
    return Segment(*(x if _products.indexed(x) else x.astype(dtype) for x in segment))


def _form(program: Program, plan: Plan, passes: Passes) -> dict[int, jax.Array]:
    """Per-example gradients (B, ...) of the parameters that fell back, in float32."""
    total: dict[int, jax.Array] = {}

    def add(leaf: int, value: jax.Array) -> None:
        total[leaf] = total[leaf] + value if leaf in total else value

    weights = passes.points.weights
    for leaf in program.opaque:
        for gradients, weight in zip(passes.gradients, weights, strict=True):
            add(leaf, _widen(weigh(gradients[leaf], weight)))
        if passes.tangent is not None:
            add(leaf, _widen(passes.tangent[3][leaf]))
    for use in plan.uses:
        view = use.value.view
        if view is not None:
            gradient = _form_use(use, _pairs(use, passes, True))
            shape = tuple(program.parameters[view.leaf].shape)
            add(view.leaf, jax.vmap(lambda g, v=view, s=shape: v.scatter(g, s))(gradient))
        else:
            for leaf, gradient in _pull_back(use, passes).items():
                add(leaf, gradient)
    return total


def _bundle(
    formed: dict[int, jax.Array], groups: list[int]
) -> tuple[list[jax.Array], tuple[tuple[int, ...], ...]]:
    """Formed gradients as few arrays (B, entries), the small ones of a clip group together."""
    bundles: dict[tuple[int, int | None], list[int]] = {}
    for leaf, gradient in formed.items():
        small = math.prod(gradient.shape[1:]) <= _BUNDLED_ENTRIES
        bundles.setdefault((groups[leaf], None if small else leaf), []).append(leaf)
    flat = {leaf: g.reshape(g.shape[0], math.prod(g.shape[1:])) for leaf, g in formed.items()}
    pieces = [jnp.concatenate([flat[i] for i in bundle], axis=1) for bundle in bundles.values()]
    return pieces, tuple(map(tuple, bundles.values()))


def _form_use(use: Use, pairs: Sequence[Pair]) -> jax.Array:
    """Per-example gradients of the value used, (B, ...) in float32, stacked like the value."""
    layout = use.layout
    segments = [
        Segment(*jax.vmap(lambda o, c: use_layout(use, o, c))(operand, weigh(cotangent, weight)))
        for operand, cotangent, weight in pairs
    ]
    stack = tuple(n for n, stacked in use.loops if stacked)
    gradients = _products.form(segments, layout.sizes)
    return jax.vmap(lambda g: layout.fold(g, (*stack, *use.value.aval.shape)))(gradients)


def _pull_back(use: Use, passes: Passes) -> dict[int, jax.Array]:
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
        gradient = _form_use(use, [(operand, cotangent, 1.0)])
        if j == 0 and passes.tangent is not None:
            direction, operands, cotangents, _ = passes.tangent
            pairs = [(operand, cotangents[use.index], 1.0)]
            if not jnp.issubdtype(operand.dtype, jnp.integer):
                pairs.append((operands[use.index], cotangent, 1.0))
            parts, changes = jax.jvp(
                lambda c, g: pull(c, g, 0),
                (chosen, gradient),
                ([direction[leaf] for leaf in leaves], _form_use(use, pairs)),
            )
        else:
            parts, changes = pull(chosen, gradient, j), None
        for i, leaf in enumerate(leaves):
            part = _widen(weigh(parts[i], weight))
            part = part if changes is None else part + _widen(changes[i])
            total[leaf] = total[leaf] + part if leaf in total else part
    return total


def zero_sums(params: PyTree, plan: Plan, pieces: Pieces) -> Sums:
    """What sums of gradients start from."""
    leaves = jax.tree.leaves(params)
    by_leaf = {product.leaf: _wide_zeros(leaves[product.leaf]) for product in plan.products}
    vectors = [jnp.zeros(g.shape[1:], g.dtype) for g in pieces.formed]
    return Sums(by_leaf, vectors, pieces.bundles)


def sum_pieces(
    start: Sums, plan: Plan, pieces: Pieces, weights: jax.Array, kept: list[jax.Array | None]
) -> Sums:
    """start + Σ_i weights[piece][i] G_i, the formed gradients of products in `kept`."""
    by_leaf, vectors = dict(start.by_leaf), list(start.vectors)
    for product, piece, gradient, weight in zip(
        plan.products, pieces.products, kept, weights, strict=False
    ):
        if gradient is not None:
            part = _weighted(weight, gradient)
        else:
            part = _products.weighted_sum(piece, weight, product.layout.sizes)
        view = dataclasses.replace(product.view, scale=1.0)  # the scale is in the factors
        part = view.scatter(product.layout.fold(part, product.layout.split), product.shape)
        total = by_leaf[product.leaf]
        by_leaf[product.leaf] = (total + part).astype(total.dtype)
    for i, gradient in enumerate(pieces.formed):
        vectors[i] += _weighted(weights[len(plan.products) + i], gradient)
    return dataclasses.replace(start, by_leaf=by_leaf, vectors=vectors)


def _weighted(weights: jax.Array, gradients: jax.Array) -> jax.Array:
    return _products.contract("b,b...->...", weights, gradients)


def unbundle(vector: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """The parts of a vector in which arrays of the shapes of `like` were put side by side."""
    parts = jnp.split(vector, np.cumsum([x.size for x in like])[:-1])
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def _wide_zeros(leaf: jax.Array) -> jax.Array:
    """What a sum of gradients of a parameter starts from."""
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32))
