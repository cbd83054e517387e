"""Per-example gradients held as products: bounds of their norms, unformed.

The gradient of example i is G_i[k] = Σ_s rows_s[i, k]ᵀ columns_s[i, k], over segments s: the
uses of one parameter, and the gradient points. Its squared norm is

    ‖G_i‖² = Σ_{k, s, s'} Σ_{t, t'} (rows_s rows_s'ᵀ)[t, t'] (columns_s columns_s'ᵀ)[t, t'],

in T²(R + C) operations where forming it takes T R C. Integers stand for one-hot factors. Entries
are of at most about 1: they come divided by powers of two (`_clip.bounds`).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clip.bounds import ROOT, Size, gamma, upper_square
from dpoptax._tree import float32_at_least, widen

# What `choose` weighs, measured by hand on one x86 CPU; no command of the benchmarks repeats it. On
# other machines the way chosen may be the slower one. The guarantee holds for each.
# A number written to memory and read back twice takes the time of so many multiply-adds,
_MULTIPLY_ADDS_OF_A_KEPT_ENTRY = 120
# one that is read back once this share of it,
_SHARE_READ_ONCE = 0.75
# a number of a factor, which is measured and divided where no gradient is kept, of so many,
_MULTIPLY_ADDS_OF_A_FACTORS_ENTRY = 40
# and gradients of so many entries, all examples together, stay in a cache and are always kept.
_ENTRIES_IN_CACHE = 2**16
# Of several points, the products of each with the fixed arrays of each take the square of their
# number: where that is so many times the time, gradients larger than the factors are kept, too.
_TIMES_WORTH_MEMORY = 1.5
# What underflow can take off a norm, for each term of the sums that it is made of.
LOST = 2.0**-50


class Segment(NamedTuple):
    """Factors of one use: `rows` (B, K, T, R), `columns` (B, K, T, C); integers (B, K, T)."""

    rows: jax.Array
    columns: jax.Array

    @property
    def swapped(self) -> "Segment":
        """The factors of the transposed gradient."""
        return Segment(self.columns, self.rows)

    def rounded(self, dtype: DTypeLike) -> "Segment":
        """The factors in a dtype, but for one-hot ones."""
        return Segment(*(x if indexed(x) else rounded(x, dtype) for x in self))


def rounded(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """An array in a narrower dtype, rounded for all who read it.

    Conversions there and back alone are left out by XLA on GPU, for those readers that it joins
    them with.
    """
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant).astype(dtype)


def indexed(factor: jax.Array) -> bool:
    """Whether a factor is one-hot, held as integers."""
    return jnp.issubdtype(factor.dtype, jnp.integer)


def contract(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """An einsum at the full precision of its operands, whatever the platform's default is.

    All that a bound rests on is contracted here: by default TPUs multiply float32 in bfloat16, and
    GPUs may in TF32. The second operand keeps its order of axes, as einsum has it on the left; with
    the larger one first, it and the result are copied.
    """
    return jnp.einsum(
        axes, a, b, precision=lax.Precision.HIGHEST, preferred_element_type=float32_at_least(a, b)
    )


def choose(
    batch: int, positions: int, rows: int, columns: int, *, segments: int, fixed: int = 0
) -> str:
    """The cheapest way to the norm of products with `positions` = Σ_s T_s, for dense factors.

    Beside products there may be terms of `fixed` arrays, of which the parameters give one a point.
    Inner products need each with all products, which takes as much as the sum. What is formed is
    the gradient by the parameter then, at one point after the other, and it is kept.

    Returns "outer" (one position: the product of two norms), "gram", "form" (form the gradients,
    contract again for the sum) or "keep" (form them and keep them for the sum).
    """
    if positions == 1 and segments == 1:
        return "outer"
    size, work, formed = rows * columns, positions * rows * columns, max(1, fixed)
    pairs = positions**2 * (segments + 1) / (2 * segments)
    memory = _MULTIPLY_ADDS_OF_A_KEPT_ENTRY * size
    factors = _MULTIPLY_ADDS_OF_A_FACTORS_ENTRY * positions * (rows + columns)
    cost = {"gram": factors + pairs * (rows + columns) + (1 + fixed) * work}
    if not fixed:
        cost["form"] = factors + 2 * work + _SHARE_READ_ONCE * memory
    kept = work + formed * memory
    small = formed * size <= 2 * positions * (rows + columns) or batch * size <= _ENTRIES_IN_CACHE
    if small or (fixed > 1 and cost["gram"] > _TIMES_WORTH_MEMORY * kept):
        cost["keep"] = kept
    return min(cost, key=cost.__getitem__)


def form(segments: list[Segment], sizes: tuple[int, int, int]) -> jax.Array:
    """The gradients themselves, (B, K, R, C) in float32."""
    total = None
    for rows, columns in _joined(segments):
        if indexed(rows):
            part = _scatter(rows, columns, sizes[1])
        elif indexed(columns):
            part = _scatter(columns, rows, sizes[2]).swapaxes(-1, -2)
        else:
            part = contract("bktr,bktc->bkrc", rows, columns)
        total = part if total is None else total + part
    assert total is not None
    return total


def _joined(segments: list[Segment]) -> list[Segment]:
    """The segments as one, along T, where that takes fewer passes over memory than their sum."""
    rows, columns = segments[0].rows.shape[-1], segments[0].columns.shape[-1]
    # Two passes over the factors, against three over a gradient for each that is added.
    fewer = 2 * _positions(segments) * (rows + columns) < 3 * (len(segments) - 1) * rows * columns
    if not fewer or any(indexed(x) for segment in segments for x in segment):
        return segments
    return [Segment(*(jnp.concatenate(side, axis=2) for side in zip(*segments, strict=True)))]


def _scatter(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
    def add(index: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((size, values.shape[-1]), float32_at_least(values))
        return zeros.at[index].add(values.astype(zeros.dtype))

    return jax.vmap(jax.vmap(add))(index, values)


def measure(segments: list[Segment], sizes: tuple[int, int, int], method: str) -> Size:
    """Upper bounds of ‖G‖² and S, (B,), from the factors, by "outer" or "gram".

    Of one position S is the norm. By inner products the error lies in the square: it is at most
    η S², with η for the longest chain of roundings.
    """
    if method == "outer":
        absolute = absolute_size(segments, sizes)
        return Size(jnp.square(absolute), absolute)
    lengths = []
    square = jnp.zeros(segments[0].rows.shape[0], jnp.float32)
    for i, a in enumerate(segments):
        for j, b in enumerate(segments[i:], i):
            inner = Segment(_inner(a.rows, b.rows), _inner(a.columns, b.columns))
            if i == j:
                lengths.append(Segment(*map(_diagonal_root, inner)))
            square += (1.0 if i == j else 2.0) * sum_by_axes(inner.rows * inner.columns)
    absolute = _absolute(segments, lengths, sizes)
    sums = sizes[0] + 2 * max(s.rows.shape[2] for s in segments) + len(segments) ** 2
    error = gamma(_summands(segments) + sums + 4)
    return Size(jnp.maximum(square, 0.0) + error * jnp.square(absolute), absolute)


def measure_formed(segments: list[Segment], sizes: tuple[int, int, int]) -> Size:
    """The same, from the gradient Ĝ as `form` gives it, where the sum contracts factors again.

    ‖G‖ ≤ ‖Ĝ‖ + ηS, and so ‖G‖² is at most (1 + η)‖Ĝ‖² + (η + η²)S².
    """
    square = upper_square(form(segments, sizes))
    absolute = absolute_size(segments, sizes)
    error = gamma(_positions(segments) + len(segments) + 8)
    return Size((1.0 + error) * square + (error + error**2) * jnp.square(absolute), absolute)


def absolute_size(segments: list[Segment], sizes: tuple[int, int, int]) -> jax.Array:
    """An upper bound of S, (B,), from the factors."""
    return _absolute(segments, [Segment(*map(_lengths, s)) for s in segments], sizes)


def _absolute(
    segments: list[Segment], lengths: list[Segment], sizes: tuple[int, int, int]
) -> jax.Array:
    """An upper bound of S: Σ_s Σ_t ‖row_t‖‖column_t‖, root of the sum of squares over K."""
    total = sum(jnp.sum(rows * columns, axis=2) for rows, columns in lengths)  # (B, K)
    groups, rows, columns = sizes
    positions = _positions(segments)
    # Norms are roots: half the roundings of their squares.
    summed = 0.5 * (_summands(segments) + groups) + positions + len(segments)
    room = 1.0 + gamma(summed + 3 * ROOT + 3)
    lost = LOST * positions * math.sqrt(groups * rows * columns)
    return room * jnp.sqrt(jnp.sum(jnp.square(total), axis=1)) + lost


def _positions(segments: list[Segment]) -> int:
    """The number of positions of all segments, at least 1."""
    return max(1, sum(s.rows.shape[2] for s in segments))


def _summands(segments: list[Segment]) -> int:
    """The longest sums in inner products of rows and of columns; one-hot ones are exact."""
    sides = zip(*segments, strict=True)
    return sum(max(0 if indexed(x) else x.shape[-1] for x in side) for side in sides)


def _lengths(factor: jax.Array) -> jax.Array:
    """The norms of a factor's vectors, (B, K, T)."""
    if indexed(factor):
        return jnp.ones(factor.shape, jnp.float32)
    square = jnp.sum(jnp.square(widen(factor)), axis=-1)
    return jnp.sqrt(square).astype(jnp.float32)


def _diagonal_root(inner: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.diagonal(inner, axis1=-2, axis2=-1))


def sum_by_axes(x: jax.Array) -> jax.Array:
    """Sums over all axes but the first, one after the other: shorter chains of roundings."""
    with jax.named_scope("sum_by_axes"):  # tests/hlo_test.py looks for it in compiled programs
        for _ in range(x.ndim - 1):
            x = lax.optimization_barrier(jnp.sum(x, axis=-1))
    return x


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """All inner products of positions, (B, K, T, T')."""
    if indexed(a) and indexed(b):
        return (a[..., :, None] == b[..., None, :]).astype(jnp.float32)
    if indexed(b):
        return _inner(b, a).swapaxes(-1, -2)
    if indexed(a):
        picked = jnp.take_along_axis(b, a[..., None, :], axis=-1)  # (B, K, T', T)
        return picked.swapaxes(-1, -2).astype(jnp.float32)
    return contract("bktr,bksr->bkts", a, b).astype(jnp.float32)
