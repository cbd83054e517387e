"""Bounds the norms of gradients with fixed terms in addition to outer products.

    G = Σ_t rows_t ⊗ columns_t + Σ_k basis_k ⊙ weights_k

Norm and sum only read the factors, bases and weights that are stored here, however they were
computed. These numbers define G, and this G is clipped.
"""

import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.factor_products import FactoredGradients, MeasuredTerm, Segment
from dpoptax._ghost_clipping.transformed.cotangents import (
    FixedTerm,
    NotFactoredError,
    OuterSum,
    normalize_fixed,
)
from dpoptax._ghost_clipping.transformed.pull_back import CotangentSum
from dpoptax._losses.rules import FactorLayout, Sizes
from dpoptax._rounding import bounds
from dpoptax._rounding.bounds import NormBounds
from dpoptax._support.xla import materialize

# Scaled factors whose largest entry is smaller than this, before normalization, count as zero.
_UNDERFLOW_THRESHOLD = 2.0**-40


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
    total = materialize(functools.reduce(operator.add, parts))
    columns = total.reshape(total.shape[0], 1, 1, math.prod(shape))
    segment = Segment(jnp.ones((total.shape[0], 1, 1, 1), jnp.float32), columns)
    return [OuterSum(segment, FactorLayout.entrywise(shape), shape, mixed=True)], []


def scale_segment(segment: Segment, scale: jax.Array) -> Segment:
    """Multiplies one factor by a fixed array (K, R, D), with R = 1 or D = 1."""
    rows, columns = segment
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
) -> tuple[FactoredGradients, jax.Array, jax.Array]:
    """Divides each example's gradient by a power of two, and stores the gradients.

    Returns:
      The gradients, the exponent (B,) of the divisor, and whether the gradients are finite, (B,).
      Gradients that are not finite are zero.
    """
    cut = outers[0].cut
    parts = [_scale_outer(x) for x in outers]
    bases = [normalize_fixed(cut(_basis_array(t, len(outers[0].shape)))) for t in terms]
    # Stored, because two readers would each compute these long sums again.
    weights = materialize([jax.vmap(cut)(t.weights) for t in terms])
    tops = [bounds.largest_entry(w) for w in weights]
    exponents = [part.exponent for part in parts]
    exponents += [e + bounds.binary_exponent(t) for (_, e), t in zip(bases, tops, strict=True)]
    # One divisor for all parts of an example, since they are added.
    largest = functools.reduce(jnp.maximum, exponents)
    # A zero gradient is divided by 1, so no exponent below is near the end of its range.
    divisor = jnp.where(largest < -(2**12), 0, largest)
    sound = [jnp.all(jnp.isfinite(basis)) for basis, _ in bases]
    finite = [part.finite for part in parts] + [jnp.isfinite(t) for t in tops]
    keep = functools.reduce(jnp.logical_and, finite + sound)

    def divide(x: jax.Array, exponent: jax.Array) -> jax.Array:
        return bounds.divide_by_power(x, jnp.where(keep, divisor - exponent, bounds.ERASE_EXPONENT))

    columns = materialize([divide(part.segment.columns, part.taken) for part in parts])
    exact = [Segment(part.rows(keep), c) for part, c in zip(parts, columns, strict=True)]
    segments = [segment.rounded(dtype) for segment in exact]
    kept = materialize(
        [jnp.where(ok, basis, 0) for (basis, _), ok in zip(bases, sound, strict=True)]
    )
    divided = materialize([divide(w, e) for w, (_, e) in zip(weights, bases, strict=True)])
    found: list[MeasuredTerm] = []
    for term, basis, weight in zip(terms, kept, divided, strict=True):
        axes, inner = term.fixed_axes, jnp.zeros_like(weight)
        for outer, part, before, segment in zip(outers, parts, exact, segments, strict=True):
            if segment is before and not outer.mixed:
                # Pulling back has already contracted the unscaled factors.
                inner += part.read(outer.inner_product(term.basis, axes)[0], divisor, keep)
            else:  # the factors were changed
                now = OuterSum(segment, outer.layout, outer.shape)
                inner += now.inner_product(term.basis, axes)[0]
        found.append(MeasuredTerm(basis, weight, inner))
    return FactoredGradients(segments, outers[0].layout.sizes, found), largest, keep


class _ScaledOuter(NamedTuple):
    """Holds outer products after multiplying one factor by the scale.

    The gradient is 2^unit · scale ⊙ Σ_t rows_t ⊗ columns_t for the old factors, and 2^taken times
    the product of the new factors in `segment`. `exponent` is about that of its largest entry.
    `nothing` marks examples whose columns were treated as zero. `changed` says whether the rows are
    new.
    """

    segment: Segment
    scale: jax.Array
    unit: jax.Array
    taken: jax.Array
    exponent: jax.Array
    finite: jax.Array
    nothing: jax.Array
    changed: bool

    def read(self, x: jax.Array, divisor: jax.Array, keep: jax.Array) -> jax.Array:
        """Rescales numbers of the old factors to the new factors divided by 2^divisor."""
        exponent = bounds.broadcast_examples(self.unit - divisor, x)
        keep = bounds.broadcast_examples(keep & ~self.nothing, x)
        # Overflow gives infinity. The numbers are part of a norm, which must not become smaller.
        return jnp.where(keep, bounds.ldexp(x, exponent), 0.0)

    def rows(self, keep: jax.Array) -> jax.Array:
        """Returns the rows, with zeros for examples that are not in `keep`.

        Unchanged rows are already finite.
        """
        if not self.changed:
            return self.segment.rows
        return materialize(
            bounds.divide_by_power(self.segment.rows, jnp.where(keep, 0, bounds.ERASE_EXPONENT))
        )


def _scale_outer(outer: OuterSum) -> _ScaledOuter:
    rows, columns = outer.segment
    scale, unit = jnp.ones((1, 1, 1), jnp.float32), jnp.zeros((), jnp.int32)
    taken = jnp.zeros(rows.shape[:1], jnp.int32)
    if outer.scale is not None:
        scale, unit = normalize_fixed(outer.scale)
        scale = materialize(outer.cut(scale))
        rows, columns = scale_segment(outer.segment, scale)
    finite = jnp.all(jnp.isfinite(scale))
    if outer.mixed:
        top = bounds.largest_entry(rows)
        finite &= jnp.isfinite(top)
        # After a matrix product, rows may have any magnitude, so they are divided as well.
        taken = jnp.maximum(bounds.binary_exponent(top), -126)
        rows = bounds.divide_by_power(rows, taken)
    top = bounds.largest_entry(columns)
    # Otherwise, the division would scale up the error of entries that underflowed.
    nothing = top < (_UNDERFLOW_THRESHOLD if outer.scale is not None and not outer.mixed else 0.0)
    columns = jnp.where(nothing.reshape(-1, 1, 1, 1), 0, columns)
    top = jnp.where(nothing, 0, top)
    taken = taken + unit
    return _ScaledOuter(
        Segment(rows, columns), scale, unit, taken, taken + bounds.binary_exponent(top),
        finite & jnp.isfinite(top), nothing, rows is not outer.segment.rows,
    )  # fmt: skip


def _basis_array(term: FixedTerm, rank: int) -> jax.Array:
    return jnp.ones((1,) * rank, jnp.float32) if term.basis is None else term.basis


def measure_terms(factored: FactoredGradients) -> NormBounds:
    """Returns upper bounds of ‖G‖² and S, (B,), of gradients with fixed terms.

    S is the S of the products plus Σ_k ‖basis_k ⊙ weights_k‖. ‖G‖² is that of the products plus

        2 Σ_k ⟨weights_k, inner_k⟩ + Σ_kl ⟨basis_k ⊙ weights_k, basis_l ⊙ weights_l⟩.

    The error of each summand is at most γ times the product of the sizes of its two sides.
    """
    segments, sizes, terms = factored.segments, factored.sizes, factored.terms
    count = len(terms)
    more, crossed = _term_sizes(terms, sizes)
    size = factor_products.measure(segments, sizes, "gram")
    absolute = (size.absolute + more) * (1.0 + bounds.gamma(4))
    positions = sum(segment.rows.shape[2] for segment in segments)
    operations = sum(sizes) + positions + count * (count + 3) // 2 + len(segments) + 12
    beside = bounds.gamma(operations) * more * (absolute + size.absolute)
    error = beside + bounds.gamma(8) * jnp.square(absolute)
    return NormBounds(jnp.maximum(size.square + crossed, 0.0) + error, absolute)


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
    room = 1.0 + bounds.gamma(sum(sizes) + len(terms) + 16)
    lost = len(terms) * factor_products.UNDERFLOW_LOSS * math.sqrt(math.prod(sizes))
    return room * jnp.sqrt(len(terms) * total(squares)) + lost, total(crossed)


def _drop_unit_axes(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], *(n for n in x.shape[1:] if n != 1))
