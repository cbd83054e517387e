"""Per-example gradients of one parameter: products of factors, and fixed arrays times weights.

    G = Σ_t rows_t ⊗ columns_t + Σ_k basis_k ⊙ weights_k

The terms are what gradients that were pulled back have beside products (`pulling`). All that a
norm and a sum read are the factors, bases and weights as they are held here, however they were
computed: G is what they make, and what is clipped.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from dpoptax._clip import bounds
from dpoptax._clip.bounds import Size
from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.cotangents import NotFactoredError, Outer, Term, normalised
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._ghost_clipping.norms.pull_back import Cotangent
from dpoptax._ghost_clipping.trace.rules import Layout
from dpoptax._xla import materialize

# Scaled factors whose largest entry is below this, before they are divided by it, are zero.
_LEAST = 2.0**-40


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """A term: `basis`, and `weights` (B, …) of each example, axes (K, R, C) or 1 each.

    `inner` is the inner product of basis and products along the axes where weights are of size 1.
    """

    basis: jax.Array
    weights: jax.Array
    inner: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Factored:
    """The gradients of a parameter, of entries of at most about 1.

    Attributes:
      segments: the factors.
      terms: what is beside their products.
    """

    segments: list[Segment]
    terms: list[Held] = dataclasses.field(default_factory=list)


def as_products(cotangent: Cotangent) -> tuple[list[Outer], list[Term]]:
    """Outer products in one layout, and terms."""
    shape, outers, terms = cotangent.shape, cotangent.outers, cotangent.terms
    if outers:
        if any(x.layout != outers[0].layout for x in outers):
            raise NotFactoredError
        return outers, _merged(terms)
    if any(t.thin != shape for t in terms):
        raise NotFactoredError
    # A number of each example for each entry: one position.
    parts = [t.weights if t.basis is None else t.weights * t.basis for t in terms]
    total = materialize(functools.reduce(operator.add, parts))
    columns = total.reshape(total.shape[0], 1, 1, math.prod(shape))
    segment = Segment(jnp.ones((total.shape[0], 1, 1, 1), jnp.float32), columns)
    return [Outer(segment, Layout.entrywise(shape), shape, mixed=True)], []


def with_scale(segment: Segment, scale: jax.Array) -> Segment:
    """The factors times a fixed array (K, R, C), of which R or C is 1, in one of them."""
    rows, columns = segment
    if scale.shape[1] == 1:
        return Segment(rows, columns * scale)
    return Segment(rows * scale.swapaxes(1, 2), columns)


def check(outers: list[Outer], terms: list[Term]) -> None:
    """Raises a NotFactoredError for what `assemble` cannot hold."""
    for outer in outers:
        if outer.scale is not None and 1 not in outer.cut(outer.scale).shape[1:]:
            raise NotFactoredError
        for term in terms:
            outer.sides(term.fixed_along)


def _merged(terms: list[Term]) -> list[Term]:
    """The terms, those of one basis added up."""
    found: dict[tuple[int, tuple[int, ...]], Term] = {}
    for term in terms:
        key = (id(term.basis), term.thin)
        if key in found:
            term = Term(term.basis, found[key].weights + term.weights)
        found[key] = term
    return list(found.values())


def assemble(
    outers: list[Outer], terms: list[Term], dtype: DTypeLike | None
) -> tuple[Factored, jax.Array, jax.Array]:
    """Holds gradients over a power of two of each example's own.

    Returns:
      The gradients, the exponent (B,) of what they were divided by, and whether they are finite,
      (B,): what is not is zero.
    """
    cut = outers[0].cut
    parts = [_scaled(x) for x in outers]
    bases = [normalised(cut(_basis(t, len(outers[0].shape)))) for t in terms]
    # Sums over many numbers, which two readers would each compute anew.
    weights = materialize([jax.vmap(cut)(t.weights) for t in terms])
    tops = [bounds.top(w) for w in weights]
    exponents = [part.exponent for part in parts]
    exponents += [e + bounds.exponent(t) for (_, e), t in zip(bases, tops, strict=True)]
    largest = functools.reduce(jnp.maximum, exponents)
    # A gradient that is zero is divided by 1: no power of two here is near the end of its range.
    divisor = jnp.where(largest < -(2**12), 0, largest)
    sound = [jnp.all(jnp.isfinite(basis)) for basis, _ in bases]
    finite = [part.finite for part in parts] + [jnp.isfinite(t) for t in tops]
    keep = functools.reduce(jnp.logical_and, finite + sound)

    def over(x: jax.Array, exponent: jax.Array) -> jax.Array:
        return bounds.over_power(x, jnp.where(keep, divisor - exponent, bounds.ERASED))

    columns = materialize([over(part.segment.columns, part.taken) for part in parts])
    segments = [Segment(part.rows(keep), c) for part, c in zip(parts, columns, strict=True)]
    if dtype is not None:
        segments = [segment.rounded(dtype) for segment in segments]
    kept = materialize(
        [jnp.where(ok, basis, 0) for (basis, _), ok in zip(bases, sound, strict=True)]
    )
    over_powers = materialize([over(w, e) for w, (_, e) in zip(weights, bases, strict=True)])
    found: list[Held] = []
    for term, basis, weight in zip(terms, kept, over_powers, strict=True):
        axes, inner = term.fixed_along, jnp.zeros_like(weight)
        for outer, part, segment in zip(outers, parts, segments, strict=True):
            if dtype is None and not outer.mixed:
                inner += part.read(outer.against(term.basis, axes)[0], divisor, keep)
            else:  # with the factors as they are now
                now = Outer(segment, outer.layout, outer.shape)
                inner += now.against(term.basis, axes)[0]
        found.append(Held(basis, weight, inner))
    return Factored(segments, found), largest, keep


class _Part(NamedTuple):
    """Outer products with their scale in one factor.

    The gradient is 2^unit · scale ⊙ Σ_t rows_t ⊗ columns_t of the factors before, and 2^taken
    times the product of these; `exponent` is that of its largest entries, about. `nothing` says
    which examples' columns were taken for zero, `changed` whether the rows are other than they
    came.
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
        """What was computed from the factors before, as of these over 2^divisor."""
        exponent = bounds.by_example(self.unit - divisor, x)
        keep = bounds.by_example(keep & ~self.nothing, x)
        # Infinite where it overflows: it is part of a norm, which may not become smaller.
        return jnp.where(keep, bounds.ldexp(x, exponent), 0.0)

    def rows(self, keep: jax.Array) -> jax.Array:
        """Those of the factors, zero where not `keep`; as they came they are finite."""
        if not self.changed:
            return self.segment.rows
        return materialize(bounds.over_power(self.segment.rows, jnp.where(keep, 0, bounds.ERASED)))


def _scaled(outer: Outer) -> _Part:
    rows, columns = outer.segment
    scale, unit = jnp.ones((1, 1, 1), jnp.float32), jnp.zeros((), jnp.int32)
    taken = jnp.zeros(rows.shape[:1], jnp.int32)
    if outer.scale is not None:
        scale, unit = normalised(outer.scale)
        scale = materialize(outer.cut(scale))
        rows, columns = with_scale(outer.segment, scale)
    finite = jnp.all(jnp.isfinite(scale))
    if outer.mixed:
        top = bounds.top(rows)
        finite &= jnp.isfinite(top)
        taken = jnp.maximum(bounds.exponent(top), -126)
        rows = bounds.over_power(rows, taken)
    top = bounds.top(columns)
    # Else what is lost where scaled entries underflow would be divided up to matter.
    nothing = top < (_LEAST if outer.scale is not None and not outer.mixed else 0.0)
    columns = jnp.where(nothing.reshape(-1, 1, 1, 1), 0, columns)
    top = jnp.where(nothing, 0, top)
    taken = taken + unit
    return _Part(
        Segment(rows, columns), scale, unit, taken, taken + bounds.exponent(top),
        finite & jnp.isfinite(top), nothing, rows is not outer.segment.rows,
    )  # fmt: skip


def _basis(term: Term, rank: int) -> jax.Array:
    return jnp.ones((1,) * rank, jnp.float32) if term.basis is None else term.basis


def measure_terms(factored: Factored, sizes: tuple[int, int, int]) -> Size:
    """Upper bounds of ‖G‖² and S, (B,), of gradients with terms.

    S is that of the products and Σ_k ‖basis_k ⊙ weights_k‖. ‖G‖² has, beside that of the products,

        2 Σ_k ⟨weights_k, inner_k⟩ + Σ_kl ⟨basis_k ⊙ weights_k, basis_l ⊙ weights_l⟩,

    of which each summand errs by at most γ times the product of the sizes of its two sides.
    """
    segments, terms, count = factored.segments, factored.terms, len(factored.terms)
    more, crossed = _sizes_of_terms(terms, sizes)
    size = factor_products.measure(segments, sizes, "gram")
    absolute = (size.absolute + more) * (1.0 + bounds.gamma(4))
    positions = sum(segment.rows.shape[2] for segment in segments)
    operations = sum(sizes) + positions + count * (count + 3) // 2 + len(segments) + 12
    beside = bounds.gamma(operations) * more * (absolute + size.absolute)
    error = beside + bounds.gamma(8) * jnp.square(absolute)
    return Size(jnp.maximum(size.square + crossed, 0.0) + error, absolute)


def _sizes_of_terms(terms: list[Held], sizes: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
    """An upper bound of Σ_k ‖basis_k ⊙ weights_k‖, and what terms add to ‖G‖².

    The bound is √(K Σ_k ‖basis_k ⊙ weights_k‖²), for K terms.
    """
    squares: dict[tuple[int, ...], jax.Array] = {}
    crossed: dict[tuple[int, ...], jax.Array] = {}

    def add(to: dict[tuple[int, ...], jax.Array], x: jax.Array) -> None:
        to[x.shape] = to[x.shape] + x if x.shape in to else x

    def total(found: dict[tuple[int, ...], jax.Array]) -> jax.Array:
        sums = [factor_products.sum_by_axes(_squeezed(x)) for x in found.values()]
        return functools.reduce(operator.add, sums)

    for i, a in enumerate(terms):
        add(crossed, 2.0 * a.weights * a.inner)
        for j, b in enumerate(terms[i:], i):
            thin = [n == m == 1 for n, m in zip(a.weights.shape, b.weights.shape, strict=True)][1:]
            axes = [axis for axis, flag in enumerate(thin) if flag]
            fixed = a.basis * b.basis
            missing = math.prod(sizes[axis] for axis in axes if fixed.shape[axis] == 1)
            for axis in axes:  # one after the other: shorter chains of roundings
                fixed = materialize(jnp.sum(fixed, axis, keepdims=True))
            product = float(missing) * fixed * a.weights * b.weights
            add(crossed, product if i == j else 2.0 * product)
            if i == j:
                add(squares, product)
    room = 1.0 + bounds.gamma(sum(sizes) + len(terms) + 16)
    lost = len(terms) * factor_products.LOST * math.sqrt(math.prod(sizes))
    return room * jnp.sqrt(len(terms) * total(squares)) + lost, total(crossed)


def _squeezed(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], *(n for n in x.shape[1:] if n != 1))
