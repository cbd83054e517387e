"""Per-example gradients over powers of two, as products of factors or formed, and their sums."""

import dataclasses
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from dpoptax._clip import block_sums, bounds
from dpoptax._clip.bounds import Scales, Size
from dpoptax._ghost_clipping.norms.cotangents import Outer, Term
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._ghost_clipping.norms.pull_back import FixedArrays
from dpoptax._ghost_clipping.norms.pulled_back_norms import Factored, assemble
from dpoptax._ghost_clipping.norms.several_points import pull_back_all
from dpoptax._ghost_clipping.passes.evaluate import use_layout
from dpoptax._ghost_clipping.passes.gradient_passes import Passes, pairs_by_point, pairs_of
from dpoptax._ghost_clipping.plan import Member, Plan, Product
from dpoptax._ghost_clipping.sums.formed_gradients import bundled, form, unbundle
from dpoptax._ghost_clipping.sums.weighted_products import rounding, weighted_sum
from dpoptax._ghost_clipping.trace.program import Program, Use
from dpoptax._linear_map import forward
from dpoptax._points import weigh
from dpoptax._tree import PyTree, float32_at_least
from dpoptax._xla import materialize, unstack

# Factors of more entries than this are stored, and not computed again by what reads them.
_ENTRIES_STORED = 2**23

# A use, its operand, and its cotangent times the weight.
Factors: TypeAlias = tuple[Member, jax.Array, jax.Array]
# The exponents of 2 that the two sides of a piece are divided by, (B,) each.
Sides: TypeAlias = tuple[jax.Array, jax.Array]


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
class Pieces:
    """Per-example gradients over powers of two: products first, then formed ones.

    Attributes:
      products: the factors of each, of which no entry is above 2, and what is beside them.
      formed: (B, entries) each, the parameters of a bundle side by side.
      sizes: those of `formed`.
      scales: what all were divided by; `None` where there are none.
      bundles: the parameters in each of `formed`.
    """

    products: list[Factored]
    formed: list[jax.Array]
    sizes: list[Size]
    scales: Scales | None
    bundles: tuple[tuple[int, ...], ...]


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
    linear_map = passes.points.linear_map
    maps = [None] * len(program.parameters) if linear_map is None else linear_map.factors
    gradients = {
        leaf: jax.vmap(functools.partial(forward, maps[leaf]))(gradient)
        for leaf, gradient in form(program, plan, passes, factor_dtype).items()
    }
    formed, bundles = bundled(gradients, groups)
    formed = materialize(formed)
    factors = [factors_of(product, passes, differences) for product in plan.products]
    tops = [_tops(product) for product in factors]
    tops += [(jnp.ones_like(top), True, top) for top in map(bounds.top, formed)]
    if not tops:
        return Pieces([], [], [], None, ())
    scales, sides = _scaled(tops)
    fixed = [FixedArrays(leaves) for leaves in passes.leaves]
    products, moved = [], []
    for i, (product, uses) in enumerate(zip(plan.products, factors, strict=True)):
        divided = [(use[0], _factored(*use, sides[i])) for use in uses]
        if product.pulled:
            pulled = _pulled(product, divided, fixed, differences)
            piece, *more = assemble(*pulled, factor_dtype)
            moved.append((i, *more))
        else:
            segments = [segment for _, segment in divided]
            factor = maps[product.leaf]
            if factor is not None and product.mapping is not None:
                segments, *more = product.mapping(factor, segments)
                moved.append((i, *more))
            if factor_dtype is not None:
                segments = [segment.rounded(factor_dtype) for segment in segments]
            piece = Factored(segments)
        products.append(piece)
    if moved:
        places, exponents, kept = zip(*moved, strict=True)
        scales = scales._replace(
            exponent=scales.exponent.at[np.array(places)].add(jnp.stack(exponents)),
            finite=scales.finite.at[np.array(places)].min(jnp.stack(kept)[:, None]),
        )
    sized = [
        bounds.formed(x, of_entries)
        for x, (_, of_entries) in zip(formed, sides[len(products) :], strict=True)
    ]
    return Pieces(products, [x for x, _ in sized], [size for _, size in sized], scales, bundles)


def factors_of(product: Product, passes: Passes, differences: bool) -> list[Factors]:
    """What a product is of, use by use and point by point, as it is."""
    return [
        (member, operand, weigh(cotangent, weight, member.view.scale))
        for member in product.members
        for operand, cotangent, weight in (
            pairs_of(member.use, passes, differences)
            if member.pulled is None
            else pairs_by_point(member.use, passes)
        )
    ]


def _tops(factors: list[Factors]) -> tuple[jax.Array, bool, jax.Array]:
    """The largest entries of operands, whether parameters change them, and of cotangents."""
    of_cotangents = [bounds.top(cotangent) for _, _, cotangent in factors]
    ones = jnp.ones_like(of_cotangents[0])
    of_operands = [bounds.top(o) if _scales(member.use, o) else ones for member, o, _ in factors]
    varies = any(member.use.operand_varies for member, _, _ in factors)
    operands, cotangents = (functools.reduce(jnp.maximum, x) for x in (of_operands, of_cotangents))
    return operands, varies, cotangents


def _scaled(
    tops: list[tuple[jax.Array, bool, jax.Array]],
) -> tuple[Scales, list[Sides]]:
    """The scales of all pieces, and the two sides of each.

    Operands that no parameter changes have scales made apart from all others: where `jax.vmap` maps
    a step over many parameters, these stay as they are, and so do the operands divided by them.
    """
    one = jnp.ones_like(tops[0][0])
    of_data, data = bounds.scales(
        [(one if varies else operand)[None] for operand, varies, _ in tops]
    )
    of_others, others = bounds.scales(
        [jnp.stack([operand if varies else one, cotangent]) for operand, varies, cotangent in tops]
    )
    scales = Scales(
        data.exponent + others.exponent,
        jnp.concatenate([data.finite, others.finite], axis=1),
    )
    # The sides of pieces one after the other.
    fixed, changing = unstack(
        *(x.reshape(x.shape[0] * x.shape[1], one.size) for x in (of_data, of_others))
    )
    sides = [
        (changing[2 * i] if varies else fixed[i], changing[2 * i + 1])
        for i, (_, varies, _) in enumerate(tops)
    ]
    return scales, sides


def _factored(
    member: Member,
    operand: jax.Array,
    cotangent: jax.Array,
    sides: Sides,
) -> Segment:
    """The factors of one use, each side over a power of two of the example's own."""
    of_operands, of_cotangents = sides
    if _scales(member.use, operand):
        operand = bounds.over_power(operand, of_operands)
        # XLA would compute it for the norm, and once more for the sum: two arrays of its size.
        operand = materialize(operand) if operand.size > _ENTRIES_STORED else operand
    else:
        of_cotangents = of_cotangents + of_operands
    cotangent = bounds.over_power(cotangent, of_cotangents)
    return segment_of(member, operand, cotangent)


def _pulled(
    product: Product,
    uses: list[tuple[Member, Segment]],
    fixed: list[FixedArrays],
    differences: bool,
) -> tuple[list[Outer], list[Term]]:
    """The gradients of a parameter that is not itself what is used, at all points."""
    outers: list[Outer] = []
    terms: list[Term] = []
    for member in product.members:
        segments = [segment for other, segment in uses if other is member]
        if member.pulled is None:
            outers += [Outer(segment, member.layout, product.shape) for segment in segments]
        else:
            found = pull_back_all(
                member.use, product.leaf, segments, fixed, differences=differences
            )
            outers += found[0]
            terms += found[1]
    return outers, terms


def _scales(use: Use, operand: jax.Array) -> bool:
    """Whether an operand's magnitude goes into its factor: one-hot ones and a shift's are as is."""
    return use.rule.reads_data and not jnp.issubdtype(operand.dtype, jnp.integer)


def segment_of(member: Member, operand: jax.Array, cotangent: jax.Array) -> Segment:
    """The factors of one use, in the layout of its product."""
    segment = Segment(*jax.vmap(lambda o, c: use_layout(member.use, o, c))(operand, cotangent))
    segment = segment if member.cut is None else member.cut(segment)
    return segment.swapped if member.swapped else segment


def zero_sums(params: PyTree, plan: Plan, pieces: Pieces) -> Sums:
    """What sums of gradients start from."""
    leaves = jax.tree.leaves(params)
    by_leaf = {product.leaf: _wide_zeros(leaves[product.leaf]) for product in plan.products}
    vectors = [jnp.zeros(g.shape[1:], g.dtype) for g in pieces.formed]
    return Sums(by_leaf, vectors, pieces.bundles)


def sum_pieces(
    start: Sums,
    plan: Plan,
    pieces: Pieces,
    weights: jax.Array,
    *,
    bound: float,
    examples: int,
) -> Sums:
    """start + Σ_i weights[piece][i] G_i, of which no summand has a norm above `bound`.

    They are a part of so many `examples`, which say how it is summed.
    """
    by_leaf, vectors = dict(start.by_leaf), list(start.vectors)
    (of_pieces,) = unstack(weights)
    for product, piece, weight in zip(plan.products, pieces.products, of_pieces, strict=False):
        part = weighted_sum(piece, weight, product.layout.sizes, bound=bound, examples=examples)
        view = dataclasses.replace(product.view, scale=1.0)  # the scale is in the factors
        part = view.scatter(product.layout.fold(part, product.layout.split), product.shape)
        total = by_leaf[product.leaf]
        by_leaf[product.leaf] = (total + part).astype(total.dtype)
    for i, gradient in enumerate(pieces.formed):
        vectors[i] += block_sums.weighted(of_pieces[len(plan.products) + i], gradient)
    return dataclasses.replace(start, by_leaf=by_leaf, vectors=vectors)


def rounding_of(plan: Plan, pieces: Pieces, whole: block_sums.Whole) -> float:
    """τ of `sum_pieces` over all parts of a batch, and of adding these up."""
    found = [
        rounding(piece, product.layout.sizes, whole.examples)
        for product, piece in zip(plan.products, pieces.products, strict=True)
    ]
    return block_sums.tau(whole, found)


def _wide_zeros(leaf: jax.Array) -> jax.Array:
    """What a sum of gradients of a parameter starts from."""
    return jnp.zeros(leaf.shape, float32_at_least(leaf))
