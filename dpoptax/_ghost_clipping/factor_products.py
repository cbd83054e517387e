"""Bounds the norms of per-example gradients that are represented by factors.

The gradient of example i is G_i[k] = Σ_s rows_s[i, k]ᵀ columns_s[i, k]. The segments s are the uses
of one parameter at all gradient points. Its squared norm is

    ‖G_i‖² = Σ_{k, s, s'} Σ_{t, t'} (rows_s rows_s'ᵀ)[t, t'] (columns_s columns_s'ᵀ)[t, t'],

which takes L²(R + D) operations. Forming the gradient takes L R D operations. The letters in
contractions are

    b  examples B      t, s  positions L, L' of two segments, such as tokens
    k  stacks K        r, d  rows R and columns D of the gradient, the sides of a kernel

For a kernel of (768, 3072) and 128 tokens, rows are (B, 1, 128, 768) and columns (B, 1, 128, 3072).
The two matrices of inner products have 128² entries each, and the gradient 144 times as many.

Integers represent one-hot factors. Gradients with a factor outside of the working range get an
infinite S (`dpoptax._rounding.bounds`).
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from dpoptax._losses.rules import Sizes
from dpoptax._rounding.bounds import (
    LARGEST_NUMBER,
    ROOT_ROUNDINGS,
    NormBounds,
    gamma,
    lost_squares,
    upper_square,
)
from dpoptax._support.tree import float32_at_least, widen
from dpoptax._support.xla import cut_along, map_range, round_to_dtype

# Norms of vectors with n entries get this much more for each √n. It covers squares that are set to
# zero, and makes the product of two norms so large that zeros in their inner product count as few
# roundings: products of entries and partial sums lose at most 2 n 2^-126, which is 8 u n 2^-104.
_VECTOR_FLOOR = 2.0**-52
LOST_PRODUCTS = 8
"""Error by products set to zero, as a number of roundings relative to a product of sizes."""
# A norm over stacks loses at most this much for each √K, because squares are set to zero.
_LOST_STACKS = 2.0**-62
# Longer rows and columns, such as the logits of a large vocabulary, are contracted in parts, one
# after the other, so that rounding grows with the length and the number of parts. The patches of
# 3 × 3 kernels on 512 channels are not longer.
_LONG = 9 * 2**9
_PART = 2**9
# The entries of gradients that are formed at once and then discarded.
_FORMED_ENTRIES = 2**22
# On TPU, stacked matrices with more entries are computed one after the other.
_LARGE_MATRIX = 2**16


class Segment(NamedTuple):
    """Holds the factors of one use: `rows` (B, K, L, R) and `columns` (B, K, L, D).

    For a dense layer `y = x @ w`, rows are `x` as (B, 1, 1, R) and columns ∂ℓ/∂y as (B, 1, 1, D).
    Rows of a lookup are one-hot, represented by integers (B, K, L).
    """

    rows: jax.Array
    columns: jax.Array

    @property
    def swapped(self) -> "Segment":
        """Returns the factors of the transposed gradient."""
        return Segment(self.columns, self.rows)

    @property
    def is_lookup(self) -> bool:
        """Returns whether rows are one-hot."""
        return is_one_hot(self.rows)

    @property
    def is_narrow(self) -> bool:
        """Returns whether a factor is in bfloat16."""
        return any(x.dtype == jnp.bfloat16 for x in self)

    def rounded(self, dtype: DTypeLike | None) -> "Segment":
        """Rounds factors that are not one-hot to `dtype`.

        For `None`, both are rounded to bfloat16 if one of them is in bfloat16.
        """
        if dtype is None:
            if not self.is_narrow:
                return self
            dtype = jnp.bfloat16
        return Segment(
            *(x if is_one_hot(x) or x.dtype == dtype else round_to_dtype(x, dtype) for x in self)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MeasuredTerm:
    """Holds the fixed part of a gradient, `basis` (K, R, D) times `weights` (B, K, R, D).

    Each axis has its full size or size 1. `inner` is the inner product of basis and outer products
    along the axes for which weights have size 1.
    """

    basis: jax.Array
    weights: jax.Array
    inner: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FactoredGradients:
    """Holds per-example gradients (B, K, R, D) of a parameter.

    Attributes:
      segments: the factors of the outer products.
      sizes: (K, R, D).
      fixed_terms: terms that are added to the outer products if the parameter is transformed
        before its use (`pulled_back_norms`); otherwise empty.
    """

    segments: list[Segment]
    sizes: Sizes = dataclasses.field(metadata={"static": True})
    fixed_terms: list[MeasuredTerm] = dataclasses.field(default_factory=list)

    @property
    def terms(self) -> int:
        """Returns the number of positions and fixed terms."""
        return sum(segment.rows.shape[2] for segment in self.segments) + len(self.fixed_terms)


def is_one_hot(factor: jax.Array) -> bool:
    """Returns whether a factor is one-hot, represented by integers."""
    return jnp.issubdtype(factor.dtype, jnp.integer)


def contract(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Computes an einsum at the full precision of its operands on every platform.

    All contractions on which a bound depends use this function. By default, TPUs multiply float32
    in bfloat16, and GPUs may use TF32. Pass the larger operand second: einsum puts it on the left
    and keeps its order of axes. Otherwise XLA copies it and the result.
    """
    dtype = float32_at_least(a, b)
    product = partial(
        jnp.einsum, axes, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )
    if a.dtype == b.dtype == dtype:
        return product(a, b)
    # XLA's CPU backend compiles the transpose of a bfloat16 product to an operation that it lacks.
    found: jax.Array = lax.platform_dependent(
        a, b, cpu=lambda a, b: product(a.astype(dtype), b.astype(dtype)), default=product
    )
    return found


def multiply_factors(segments: list[Segment], sizes: Sizes) -> jax.Array:
    """Forms the gradients, (B, K, R, D) in float32."""
    total = None
    for rows, columns in _join_segments(segments):
        if is_one_hot(rows):
            part = _scatter(rows, columns, sizes[1])
        else:
            part = contract("bktr,bktd->bkrd", rows, columns)  # sums over positions only
        total = part if total is None else total + part
    assert total is not None
    return total


def _join_segments(segments: list[Segment]) -> list[Segment]:
    """Joins the segments along L if this needs fewer passes over memory."""
    # The gradient [A_1; A_2]ᵀ [C_1; C_2] of factors joined along L is A_1ᵀ C_1 + A_2ᵀ C_2.
    rows, columns = segments[0].rows.shape[-1], segments[0].columns.shape[-1]
    # Joining takes two passes over the factors. Each added product takes three over a gradient.
    fewer = 2 * _positions(segments) * (rows + columns) < 3 * (len(segments) - 1) * rows * columns
    if not fewer or any(segment.is_lookup for segment in segments):
        return segments
    return [Segment(*(jnp.concatenate(side, axis=2) for side in zip(*segments, strict=True)))]


def _scatter(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
    def add(index: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((size, values.shape[-1]), float32_at_least(values))
        return zeros.at[index].add(values.astype(zeros.dtype))

    return jax.vmap(jax.vmap(add))(index, values)


def measure(segments: list[Segment], sizes: Sizes, method: str) -> NormBounds:
    """Returns upper bounds of ‖G‖² and S, (B,), using the method "outer" or "gram".

    For one position, S is the norm. Inner products include a bound of their rounding.
    """
    if method == "outer":
        # One position: G = rowᵀ column, so ‖G‖ = ‖row‖ ‖column‖ = S. In stacks, squares add up.
        absolute = absolute_size(segments, sizes)
        return NormBounds(jnp.square(absolute) + lost_squares(1), absolute)
    square, lengths = _inner_products(segments, sizes)
    absolute = _join_stacks(segments, lengths, sizes)
    # If terms cancel, the computed square may be negative. It is then replaced by zero.
    return NormBounds(jnp.maximum(square, 0.0) + _lost_products(segments, sizes), absolute)


def inner_product_sums(segments: list[Segment], sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Returns sums over all positions but one, (B, L) each, whose sums over L bound n² and S.

    They are those of `measure` with "gram", for one segment that is not stacked.
    """
    (segment,) = segments
    lengths, bound = _bound_own_products(segment, _chain_error(segments, sizes))
    products = lax.optimization_barrier(jnp.sum(bound, axis=-1))
    return products[:, 0], (lengths.rows * lengths.columns)[:, 0]


def measure_together(
    sums: list[tuple[jax.Array, jax.Array]], gradients: list[tuple[list[Segment], Sizes]]
) -> list[NormBounds]:
    """Returns the norm bounds of gradients with equally many positions, by few kernels."""
    products, lengths = (jnp.sum(jnp.stack(each), axis=-1) for each in zip(*sums, strict=True))
    lost = np.array([[_lost_products(*each)] for each in gradients], np.float32)
    room = np.array([[_length_room(*each)] for each in gradients], np.float32)
    square, absolute = jnp.maximum(products, 0.0) + lost, room * lengths
    return [NormBounds(*each) for each in zip(square, absolute, strict=True)]


def _lost_products(segments: list[Segment], sizes: Sizes) -> np.float32:
    """Returns how much ‖G‖² loses at most: of each pair of positions, four products."""
    return lost_squares(4 * sizes[0] * _positions(segments) ** 2)


def measure_formed(segments: list[Segment], sizes: Sizes) -> NormBounds:
    """Returns the bounds of `measure` from formed gradients Ĝ.

    The sum contracts the factors again. ‖G‖ ≤ ‖Ĝ‖ + ηS, so ‖G‖² is at most (1 + η)‖Ĝ‖² + (η +
    η²)S².
    """
    square, absolute = formed_square(segments, sizes), absolute_size(segments, sizes)
    # η has a rounding for each term of an entry, and eight more for six roundings of this bound.
    # Products that are set to zero need eight of η instead, not in addition: `_VECTOR_FLOOR` adds
    # to S as much as they need, so both errors are at most the larger rate times S.
    error = gamma(_positions(segments) + len(segments) + LOST_PRODUCTS)
    return NormBounds((1.0 + error) * square + (error + error**2) * jnp.square(absolute), absolute)


def formed_square(segments: list[Segment], sizes: Sizes) -> jax.Array:
    """Returns upper bounds of ‖Ĝ‖², (B,), of gradients formed for a few examples at a time."""
    examples = segments[0].rows.shape[0]
    most = min(formed_together(sizes), examples)
    # The largest divisor of the batch whose gradients fit: `part` examples are formed at once.
    part = next(n for n in range(most, 0, -1) if examples % n == 0)
    parts = [Segment(*(x.reshape(-1, part, *x.shape[1:]) for x in s)) for s in segments]
    return lax.map(lambda part: upper_square(multiply_factors(part, sizes)), parts).reshape(-1)


def formed_together(sizes: Sizes) -> int:
    """Returns the number of examples whose gradients are formed at once and then discarded."""
    return max(1, _FORMED_ENTRIES // math.prod(sizes))


def _inner_products(segments: list[Segment], sizes: Sizes) -> tuple[jax.Array, jax.Array]:
    """Returns upper bounds of ‖G‖², (B,), and Σ_s Σ_t ‖row_t‖‖column_t‖, (B, K)."""
    add = partial(_sum_inner_products, error=_chain_error(segments, sizes))

    def by_matrix() -> tuple[jax.Array, jax.Array]:
        squares, lengths = map_stacks(add, segments)
        return jnp.sum(squares, axis=0), lengths[..., 0].swapaxes(0, 1)

    def together() -> tuple[jax.Array, jax.Array]:
        return add(segments)

    if not has_large_stacks(sizes):
        return together()
    found: tuple[jax.Array, jax.Array] = lax.platform_dependent(tpu=by_matrix, default=together)
    return found


def _chain_error(segments: list[Segment], sizes: Sizes) -> float:
    """Returns the error of the sum over all products of inner products."""
    # The longest chain sums over K, L and L', over pairs of segments, and in one entry, which has a
    # product and three additions in `_bound_products`: half of eight.
    sums = sizes[0] + 2 * max(s.rows.shape[2] for s in segments) + len(segments) ** 2 + 8
    return gamma(sums) * (1.0 + 2.0 * gamma(sums))  # the bounds of rounding are also summed


def _bound_own_products(segment: Segment, error: float) -> tuple[Segment, jax.Array]:
    """Returns the norms of the vectors of a segment, and its products of inner products."""
    inner = Segment(*(_gram_matrix(x, x) for x in segment))
    # The diagonal of A Aᵀ holds ‖row_t‖², which S needs, at no further cost.
    sizes = (1 if is_one_hot(x) else x.shape[-1] for x in segment)
    lengths = Segment(*map(_diagonal_norms, inner, sizes))
    return lengths, _bound_products((segment, segment), inner, (lengths, lengths), error)


def _sum_inner_products(segments: list[Segment], *, error: float) -> tuple[jax.Array, jax.Array]:
    # ‖Σ_s A_sᵀ C_s‖² = Σ_{s, s'} ⟨A_sᵀ C_s, A_s'ᵀ C_s'⟩, and each ⟨·, ·⟩ is the sum over (t, t') of
    # (A_s A_s'ᵀ) ∘ (C_s C_s'ᵀ). The rows of the kernel are contracted first, then its columns, then
    # both position axes, so no array has R D entries.
    lengths: list[Segment] = []
    square = jnp.zeros(segments[0].rows.shape[0], jnp.float32)
    for j, b in enumerate(segments):
        own, bound = _bound_own_products(b, error)
        lengths.append(own)
        square += sum_by_axes(bound)
        for i, a in enumerate(segments[:j]):
            inner = Segment(_gram_matrix(a.rows, b.rows), _gram_matrix(a.columns, b.columns))
            bound = _bound_products((a, b), inner, (lengths[i], own), error)
            # Each pair of different segments occurs twice in the square.
            square += 2.0 * sum_by_axes(bound)
    return square, _sum_lengths(lengths)


def _bound_products(
    pair: tuple[Segment, Segment], inner: Segment, lengths: tuple[Segment, Segment], error: float
) -> jax.Array:
    """Returns products of inner products, (B, K, L, L'), with bounds of their rounding.

    An inner product of rows a, a' is off by α ≤ γ ‖a‖‖a'‖, one of columns by β. So the product is
    off by at most |A| β + α |C| + α β. `error` is that of the sum over all products. Inner products
    may be computed twice, so α β counts five times.
    """
    off_rows, off_columns = _inner_errors(pair, lengths, error)
    product = inner.rows * inner.columns
    found = product + error * jnp.abs(product) + jnp.abs(inner.rows) * off_columns
    return found + off_rows * (jnp.abs(inner.columns) + 5.0 * off_columns)


def _inner_errors(
    pair: tuple[Segment, Segment], lengths: tuple[Segment, Segment], error: float
) -> list[jax.Array | float]:
    """Returns bounds of the errors of inner products of rows, and of columns."""
    found: list[jax.Array | float] = []
    for a, b, of_a, of_b in zip(*pair, *lengths, strict=True):
        if is_one_hot(a) or is_one_hot(b):  # the inner product is an entry of the other factor
            found.append(0.0)
            continue
        size = roundings_of(a.shape[-1]) + LOST_PRODUCTS
        # The norms are rounded: as roots, each half as often as its square, plus a root and an
        # addition, together size + 10 times. So are this bound, 3 times, and `_bound_products`, 4
        # times: less than 32. The sum over all products is off by `error`.
        room = gamma(size) * (1.0 + gamma(size + 32) + 4.0 * error)
        found.append(room * of_a[..., :, None] * of_b[..., None, :])
    return found


def roundings_of(size: int) -> int:
    """Returns the roundings in an inner product of rows, or of columns, of this length."""
    return size if size <= _LONG else _PART + size // _PART + 1


def has_large_stacks(sizes: Sizes) -> bool:
    """Returns whether stacked matrices are large, such as the layers of a scan."""
    stacks, rows, columns = sizes
    return stacks > 1 and rows * columns > _LARGE_MATRIX


def map_stacks(function: Callable[[list[Segment]], Any], segments: list[Segment]) -> Any:
    """Returns function(segments of one matrix), stacked, computed one after the other.

    On TPU, a product of all stacks takes longer to compile, and its operands are copied.
    """

    def of_matrix(index: jax.Array) -> Any:
        part = partial(cut_along, start=index, size=1, axis=1)
        return function([Segment(*map(part, segment)) for segment in segments])

    return map_range(of_matrix, segments[0].rows.shape[1])


def absolute_size(segments: list[Segment], sizes: Sizes) -> jax.Array:
    """Returns an upper bound of S, (B,), from the factors."""
    lengths = _sum_lengths([Segment(*map(_vector_norms, s)) for s in segments])
    return _join_stacks(segments, lengths, sizes)


def _sum_lengths(lengths: list[Segment]) -> jax.Array:
    """Returns Σ_s Σ_t ‖row_t‖‖column_t‖, (B, K), from the norms."""
    return reduce(jnp.add, [jnp.sum(rows * columns, axis=2) for rows, columns in lengths])


def _join_stacks(segments: list[Segment], lengths: jax.Array, sizes: Sizes) -> jax.Array:
    """Returns an upper bound of S from Σ_s Σ_t ‖row_t‖‖column_t‖, combined over K by squares."""
    room = _length_room(segments, sizes)
    if sizes[0] == 1:
        return room * lengths[:, 0]
    square = jnp.sum(jnp.square(lengths), axis=1)
    return room * jnp.sqrt(square) + math.sqrt(sizes[0]) * _LOST_STACKS


def _length_room(segments: list[Segment], sizes: Sizes) -> float:
    """Returns the room for the rounding of S."""
    # Norms are roots, so they have half the relative error of their squares.
    # The inner products have R and D terms, and the square root a sum over K. The sums over t and s
    # are of norms, so they count fully. So do three roots and six operations: three additions of
    # numbers that are set to zero, the product of two norms, and this room with its product.
    summed = (
        0.5 * (_inner_product_length(segments) + sizes[0]) + _positions(segments) + len(segments)
    )
    return 1.0 + gamma(summed + 3 * ROOT_ROUNDINGS + 6)


def _positions(segments: list[Segment]) -> int:
    """Returns the number of positions of all segments, at least 1."""
    return max(1, sum(s.rows.shape[2] for s in segments))


def _inner_product_length(segments: list[Segment]) -> int:
    """Returns the number of terms in inner products of rows and of columns, together.

    Inner products with one-hot factors are exact and do not count.
    """
    sides = zip(*segments, strict=True)
    return sum(max(0 if is_one_hot(x) else x.shape[-1] for x in side) for side in sides)


def _vector_norms(factor: jax.Array) -> jax.Array:
    """Returns the norms of a factor's vectors, (B, K, L)."""
    if is_one_hot(factor):
        return jnp.ones(factor.shape, jnp.float32)
    square = jnp.sum(jnp.square(widen(factor)), axis=-1)
    return _norms_in_range(square, factor.shape[-1])


def _norms_in_range(square: jax.Array, length: int) -> jax.Array:
    """Returns upper bounds of norms from their squares, infinite outside of the working range."""
    norms = jnp.sqrt(square).astype(jnp.float32) + math.sqrt(length) * _VECTOR_FLOOR
    return jnp.where(norms < LARGEST_NUMBER, norms, jnp.inf)


def _diagonal_norms(inner: jax.Array, length: int) -> jax.Array:
    """Returns the norms of vectors of a length from their inner products."""

    def sliced(inner: jax.Array) -> jax.Array:
        size = inner.shape[-1]
        return inner.reshape(*inner.shape[:-2], size * size)[..., :: size + 1]

    def summed(inner: jax.Array) -> jax.Array:
        # Adding zeros is exact. On TPU, the sum fuses with the product, and a slice is a kernel.
        own = jnp.eye(inner.shape[-1], dtype=bool)
        return jnp.sum(inner, axis=-1, where=own)

    square = lax.platform_dependent(inner, tpu=summed, default=sliced)
    return _norms_in_range(square, length)


def sum_by_axes(x: jax.Array) -> jax.Array:
    """Sums over each axis except the first, for shorter chains of roundings."""
    # tests/clipped_grad/hlo_test.py searches compiled programs for this scope.
    with jax.named_scope("sum_by_axes"):
        for _ in range(x.ndim - 1):
            x = lax.optimization_barrier(jnp.sum(x, axis=-1))
    return x


def _gram_matrix(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns all inner products of positions, (B, K, L, L')."""
    if is_one_hot(a) and is_one_hot(b):
        # ⟨e_a[t], e_b[t']⟩ is 1 if both positions read the same row of the table.
        return (a[..., :, None] == b[..., None, :]).astype(jnp.float32)
    if is_one_hot(b):
        return _gram_matrix(b, a).swapaxes(-1, -2)
    if is_one_hot(a):
        # The inner product with a one-hot row is an entry of the other row, without rounding:
        # ⟨e_a[t], b[t']⟩ = b[t', a[t]]. For one table, a is (B, 1, L) and b (B, 1, L', R).
        picked = jnp.take_along_axis(b, a[..., None, :], axis=-1)  # (B, K, L', L)
        return picked.swapaxes(-1, -2).astype(jnp.float32)
    return _contract_in_parts(a, b).astype(jnp.float32)


def _contract_in_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    """Contracts the last axis of both factors, in parts if it is long."""
    products, size = partial(contract, "bktr,bksr->bkts"), a.shape[-1]
    if size <= _LONG:
        return products(a, b)

    def part(start: jax.Array | int, size: int) -> jax.Array:
        cut = partial(cut_along, start=start, size=size, axis=a.ndim - 1)
        return products(cut(a), cut(b))

    count, rest = divmod(size, _PART)
    total = part(count * _PART, rest)  # zeros if nothing is left
    return lax.fori_loop(0, count, lambda i, total: total + part(i * _PART, _PART), total)
