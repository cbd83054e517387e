"""Bounds the norms of gradients with fixed terms in addition to outer products.

    G = Σ_t rows_t ⊗ columns_t + Σ_k basis_k ⊙ weights_k

Norm and sum only read the factors, bases and weights that are stored here, however they were
computed. These numbers define G, and this G is clipped.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.factor_products import (
    LOST_PRODUCTS,
    FactoredGradients,
    MeasuredTerm,
    Segment,
)
from dpoptax._ghost_clipping.transformed.cotangents import (
    FixedTerm,
    NotFactoredError,
    OuterSum,
    normalize_fixed,
)
from dpoptax._ghost_clipping.transformed.pull_back import CotangentSum
from dpoptax._losses.rules import FactorLayout, Sizes
from dpoptax._rounding import bounds
from dpoptax._rounding.bounds import NormBounds, within_range
from dpoptax._support.xla import materialize

# Squares of terms, and inner products, are set to zero below 2^-126. With entries of fixed arrays
# of at least 2^-40, this is little next to S² if S includes this much for each √(K R D).
_TERM_FLOOR = 2.0**-52


def split_cotangent(cotangent: CotangentSum) -> tuple[list[OuterSum], list[FixedTerm]]:
    """Splits a cotangent into outer products in one layout, and fixed terms."""
    shape, outers, terms = cotangent.shape, cotangent.outers, cotangent.terms
    if outers:
        if any(x.layout != outers[0].layout for x in outers):
            raise NotFactoredError
        return outers, _merge_terms(terms)
    if any(t.weight_shape != shape for t in terms):
        raise NotFactoredError
    # Each example has one number for each entry, which is a product with one position.
    parts = [t.weights if t.basis is None else t.weights * t.basis for t in terms]
    total = materialize(within_range(functools.reduce(operator.add, parts)))
    columns = total.reshape(total.shape[0], 1, 1, math.prod(shape))
    segment = Segment(jnp.ones((total.shape[0], 1, 1, 1), jnp.float32), columns)
    return [OuterSum(segment, FactorLayout.entrywise(shape))], []


def scaled_segment(outer: OuterSum) -> Segment:
    """Returns the factors of outer products, one of them multiplied by the scale."""
    rows, columns = outer.segment
    if outer.scale is None:
        return outer.segment
    scale, divisor = normalize_fixed(outer.scale)
    scale = outer.cut(scale) * divisor  # (K, R, D), with R = 1 or D = 1
    if scale.shape[1] == 1:
        return Segment(rows, columns * scale)
    return Segment(rows * scale.swapaxes(1, 2), columns)


def check_parts(outers: list[OuterSum], terms: list[FixedTerm]) -> None:
    """Raises `NotFactoredError` for parts that `assemble_gradients` cannot represent."""
    for outer in outers:
        if outer.scale is not None and 1 not in outer.cut(outer.scale).shape[1:]:
            raise NotFactoredError
        for term in terms:
            outer.sides(term.fixed_axes)


def _merge_terms(terms: list[FixedTerm]) -> list[FixedTerm]:
    """Adds up the fixed terms that share a basis."""
    found: dict[tuple[int, tuple[int, ...]], FixedTerm] = {}
    for term in terms:
        key = (id(term.basis), term.weight_shape)
        if key in found:
            term = FixedTerm(term.basis, found[key].weights + term.weights)
        found[key] = term
    return list(found.values())


def assemble_gradients(
    outers: list[OuterSum], terms: list[FixedTerm], dtype: DTypeLike | None
) -> FactoredGradients:
    """Stores the gradients, with all numbers in the working range."""
    cut = outers[0].cut
    exact = [_stored_segment(outer) for outer in outers]
    segments = [segment.rounded(dtype) for segment in exact]
    bases, divisors = [], []
    for term in terms:
        basis, divisor = normalize_fixed(_basis_array(term, len(outers[0].layout.split)))
        bases.append(materialize(basis))
        divisors.append(divisor)
    # Stored, because two readers would each compute these long sums again.
    weights = materialize(
        [
            within_range(jax.vmap(cut)(term.weights) * divisor)
            for term, divisor in zip(terms, divisors, strict=True)
        ]
    )
    found: list[MeasuredTerm] = []
    for term, basis, weight in zip(terms, bases, weights, strict=True):
        axes, inner = term.fixed_axes, jnp.zeros_like(weight)
        factor = None if term.basis is None else basis
        for outer, before, segment in zip(outers, exact, segments, strict=True):
            # Pulling back has already contracted the factors, unless they were rounded since.
            same = segment is before
            read = outer if same else OuterSum(segment, outer.layout)
            inner += read.inner_product(factor, axes)
        found.append(MeasuredTerm(cut(basis), weight, inner))
    return FactoredGradients(segments, outers[0].layout.sizes, found)


def _stored_segment(outer: OuterSum) -> Segment:
    """Returns the scaled factors in the working range. A factor that was scaled is stored."""
    return Segment(
        *(
            now if now is before else materialize(within_range(now))
            for now, before in zip(scaled_segment(outer), outer.segment, strict=True)
        )
    )


def _basis_array(term: FixedTerm, rank: int) -> jax.Array:
    return jnp.ones((1,) * rank, jnp.float32) if term.basis is None else term.basis


def measure_terms(factored: FactoredGradients) -> NormBounds:
    """Returns upper bounds of ‖G‖² and S, (B,), of gradients with fixed terms.

    S is the S of the products plus Σ_k ‖basis_k ⊙ weights_k‖. ‖G‖² is that of the products plus

        2 Σ_k ⟨weights_k, inner_k⟩ + Σ_kl ⟨basis_k ⊙ weights_k, basis_l ⊙ weights_l⟩.

    The error of each summand is at most γ times the product of the sizes of its two sides.
    """
    segments, sizes, terms = factored.segments, factored.sizes, factored.fixed_terms
    count = len(terms)
    more, crossed = _term_sizes(terms, sizes)
    size = factor_products.measure(segments, sizes, "gram")
    absolute = (size.absolute + more) * (1.0 + bounds.gamma(4))
    positions = sum(segment.rows.shape[2] for segment in segments)
    # A summand is a sum over axes, positions and segments, and one of K + K (K + 1)/2. It has up to
    # seven products, and this bound six roundings: less than 20 more. `positions // 512` is spare.
    operations = sum(sizes) + positions + count * (count + 3) // 2 + len(segments) + 20
    operations += LOST_PRODUCTS + positions // 512
    # `absolute` contains `more`, so this bounds 2 Σ_k ‖term_k‖ S of the products, and all products
    # of two terms.
    term_error = bounds.gamma(operations) * more * (absolute + size.absolute)
    # The additions below are rounded relative to S².
    error = term_error + bounds.gamma(8) * jnp.square(absolute)
    square = size.square + crossed
    # A maximum may lose NaN.
    return NormBounds(jnp.where(square < 0, 0.0, square) + error, absolute)


def _term_sizes(terms: list[MeasuredTerm], sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Bounds Σ_k ‖basis_k ⊙ weights_k‖, and returns the terms' part of ‖G‖².

    For K terms, the bound is √(K Σ_k ‖basis_k ⊙ weights_k‖²).
    """
    squares: dict[tuple[int, ...], jax.Array] = {}
    crossed: dict[tuple[int, ...], jax.Array] = {}

    def add(to: dict[tuple[int, ...], jax.Array], x: jax.Array) -> None:
        to[x.shape] = to[x.shape] + x if x.shape in to else x

    def total(found: dict[tuple[int, ...], jax.Array]) -> jax.Array:
        sums = [factor_products.sum_by_axes(_drop_unit_axes(x)) for x in found.values()]
        return functools.reduce(operator.add, sums)

    for i, a in enumerate(terms):
        add(crossed, 2.0 * a.weights * a.inner)
        for j, b in enumerate(terms[i:], i):
            # Along axes on which both terms' weights are constant, the product of the bases is
            # summed once for all examples.
            thin = [n == m == 1 for n, m in zip(a.weights.shape, b.weights.shape, strict=True)][1:]
            axes = [axis for axis, flag in enumerate(thin) if flag]
            fixed = a.basis * b.basis
            missing = math.prod(sizes[axis] for axis in axes if fixed.shape[axis] == 1)
            for axis in axes:  # one axis after the other, for shorter chains of roundings
                fixed = materialize(jnp.sum(fixed, axis, keepdims=True))
            product = float(missing) * fixed * a.weights * b.weights
            add(crossed, product if i == j else 2.0 * product)
            if i == j:
                add(squares, product)
    # Sixteen more for four products in a square, the root, and four roundings of this bound.
    room = 1.0 + bounds.gamma(sum(sizes) + len(terms) + 16)
    lost = len(terms) * _TERM_FLOOR * math.sqrt(math.prod(sizes))
    return room * jnp.sqrt(len(terms) * total(squares)) + lost, total(crossed)


def _drop_unit_axes(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], *(n for n in x.shape[1:] if n != 1))
