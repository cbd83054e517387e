"""Per-example gradients held as products: their norms and weighted sums without forming them.

The gradient of example i is G_i[k] = Σ_s rows_s[i, k]ᵀ columns_s[i, k], over segments s: the
uses of one parameter, and the gradient points. Its squared norm is

    ‖G_i‖² = Σ_{k, s, s'} Σ_{t, t'} (rows_s rows_s'ᵀ)[t, t'] (columns_s columns_s'ᵀ)[t, t'],

in T²(R + C) operations where forming it takes T R C. Integers stand for one-hot factors.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

# Sums of squares outside this range may have lost small terms, or be about to overflow.
_TRUSTED = (2.0**-90, 2.0**120)
# So may sums of products, of factors that were scaled to at most 1, below this.
_LEAST = 2.0**-80
# A number written to memory and read back twice takes the time of about this many multiply-adds.
_MEMORY = 120


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """Factors of one use: `rows` (B, K, T, R), `columns` (B, K, T, C); integers (B, K, T).

    Their product counts `weight` times, (B,), or once where that is None.
    """

    rows: jax.Array
    columns: jax.Array
    weight: jax.Array | None = None

    @property
    def swapped(self) -> "Segment":
        return Segment(self.columns, self.rows, self.weight)


@dataclasses.dataclass(frozen=True)
class Terms:
    """What the squared norm of products is summed from.

    Attributes:
      rows, columns: squared norms of the factors, over all positions, (B, K).
      inner: (times, inner products of rows, of columns), each (B, K, ...).
      exact: whether nothing can cancel in the sum.
    """

    rows: jax.Array
    columns: jax.Array
    inner: list[tuple[float, jax.Array, jax.Array]]
    exact: bool


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Norms of gradients, (pieces, B), upper bounds of the terms that they were summed from, and
    whether to trust them.

    The bound is the product of the factors' norms: rounding errors are small against it, so a norm
    far below it may be all error.
    """

    norms: jax.Array
    bounds: jax.Array
    trusted: jax.Array


def indexed(factor: jax.Array) -> bool:
    """Whether a factor is one-hot, held as integers."""
    return jnp.issubdtype(factor.dtype, jnp.integer)


def wide(*arrays: jax.Array) -> jnp.dtype:
    """The dtype to accumulate in: float32, or that of the arrays where it is wider."""
    floats = [a.dtype for a in arrays if not indexed(a)]
    return jnp.result_type(jnp.float32, *floats)


def choose(batch: int, positions: int, rows: int, columns: int, *, segments: int) -> str:
    """The cheapest way to the norm of products with `positions` = Σ_s T_s, for dense factors.

    Returns "outer" (one position: the product of two norms), "gram", "form" (form the gradients,
    contract again for the sum) or "keep" (form them and keep them for the sum).
    """
    if positions == 1 and segments == 1:
        return "outer"
    size, work = rows * columns, positions * rows * columns
    pairs = positions**2 * (segments + 1) / (2 * segments)
    cost = {"gram": pairs * (rows + columns) + work, "form": 2 * work + 0.75 * _MEMORY * size}
    if size <= 2 * positions * (rows + columns) or batch * size <= 2**16:
        cost["keep"] = work + _MEMORY * size
    return min(cost, key=cost.__getitem__)


def form(segments: list[Segment], sizes: tuple[int, int, int]) -> jax.Array:
    """The gradients themselves, (B, K, R, C) in float32."""
    total = None
    for segment in _joined(segments):
        rows, columns = segment.rows, segment.columns
        if indexed(rows):
            part = _scatter(rows, columns, sizes[1])
        elif indexed(columns):
            part = _scatter(columns, rows, sizes[2]).swapaxes(-1, -2)
        else:
            part = jnp.einsum(
                "bktr,bktc->bkrc", rows, columns, preferred_element_type=wide(rows, columns)
            )
        part = _times(part, segment.weight)
        total = part if total is None else total + part
    assert total is not None
    return total


def _joined(segments: list[Segment]) -> list[Segment]:
    """The segments as one, along T, where that takes fewer passes over memory than their sum."""
    factors = [x for s in segments for x in (s.rows, s.columns)]
    rows, columns = segments[0].rows.shape[-1], segments[0].columns.shape[-1]
    positions = sum(s.rows.shape[2] for s in segments)
    # Two passes over the factors, against three over a gradient for each that is added.
    fewer = 2 * positions * (rows + columns) < 3 * (len(segments) - 1) * rows * columns
    # One-hot factors cannot be joined, and weights would round those narrower than float32.
    if not fewer or any(indexed(x) or x.dtype != wide(x) for x in factors):
        return segments
    small = "rows" if rows < columns else "columns"
    weighted = [
        dataclasses.replace(s, **{small: _times(getattr(s, small), s.weight)}) for s in segments
    ]
    return [
        Segment(
            jnp.concatenate([s.rows for s in weighted], axis=2),
            jnp.concatenate([s.columns for s in weighted], axis=2),
        )
    ]


def _times(value: jax.Array, weight: jax.Array | None) -> jax.Array:
    """Values (B, K, ...) times the weight of their example, (B,), or of (B, K)."""
    if weight is None:
        return value
    return value * weight.reshape(*weight.shape, *(1,) * (value.ndim - weight.ndim))


def _scatter(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
    def add(index: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((size, values.shape[-1]), wide(values))
        return zeros.at[index].add(values.astype(zeros.dtype))

    return jax.vmap(jax.vmap(add))(index, values)


def squares(gradient: jax.Array) -> jax.Array:
    """Squared norms (B,) of formed gradients, (B, ...)."""
    gradient = gradient.astype(wide(gradient))
    square = jnp.sum(jnp.square(gradient), axis=tuple(range(1, gradient.ndim)))
    return square.astype(jnp.float32)


def terms(segments: list[Segment], method: str) -> Terms:
    """The terms of products, by "outer" or "gram"."""
    if method == "outer":
        (segment,) = segments
        rows, columns = _squares(segment.rows), _squares(segment.columns)
        columns = _times(_times(columns, segment.weight), segment.weight)
        return Terms(rows, columns, [(1.0, rows, columns)], exact=True)
    inner = []
    for i, a in enumerate(segments):
        for j, b in enumerate(segments[i:], i):
            times = 1.0 if i == j else 2.0
            columns = _times(_times(_inner(a.columns, b.columns), a.weight), b.weight)
            inner.append((times, _inner(a.rows, b.rows), columns))
    row_squares = [_squares(s.rows) for s in segments]
    column_squares = [_times(_times(_squares(s.columns), s.weight), s.weight) for s in segments]
    total = [jnp.sum(jnp.stack(x), axis=0) for x in (row_squares, column_squares)]
    return Terms(total[0], total[1], inner, exact=False)


def combine(terms: list[Terms], formed: list[jax.Array]) -> Sizes:
    """Sizes of products, by their terms, and then of formed gradients, by their squared norms.

    Terms are scaled before they are multiplied. All pieces go through each operation together,
    since a program of many small operations takes long to compile.
    """
    norms, bounds, trusted = [], [], []
    if terms:
        groups = max(t.rows.shape[1] for t in terms)

        def together(factors: list[jax.Array]) -> jax.Array:
            return jnp.stack([jnp.pad(x, ((0, 0), (0, groups - x.shape[1]))) for x in factors])

        factors = jnp.stack(
            [together([t.rows for t in terms]), together([t.columns for t in terms])]
        )
        largest = jnp.max(factors, axis=3)  # (2, products, B)
        safe = jnp.where(largest > 0, largest, 1.0)
        unit = 1 / safe
        spread = jnp.sum(jnp.prod(factors * unit[..., None], axis=0), axis=2)
        total = jnp.stack([
            spread[i] if t.exact else _total(t, unit[0, i], unit[1, i]) for i, t in enumerate(terms)
        ])  # fmt: skip
        roots = jnp.prod(jnp.sqrt(safe), axis=0)
        norms.append(roots * jnp.sqrt(jnp.maximum(total, 0.0)))
        bounds.append(roots * jnp.sqrt(spread))
        # Where one use has large rows and another large columns, the scaled terms can be tiny.
        trusted.append(jnp.all(_trust(largest), axis=0) & (total >= _LEAST))
    if formed:
        square = jnp.stack(formed)
        norms.append(jnp.sqrt(square))
        bounds.append(norms[-1])
        trusted.append(_trust(square))
    return Sizes(jnp.concatenate(norms), jnp.concatenate(bounds), jnp.concatenate(trusted))


def _total(terms: Terms, row_unit: jax.Array, column_unit: jax.Array) -> jax.Array:
    """The squared norms (B,) that terms sum to, with their factors times the units."""
    total = jnp.zeros_like(row_unit)
    for times, row, column in terms.inner:
        scaled = _times(row, row_unit) * _times(column, column_unit)
        total += times * jnp.sum(scaled, axis=tuple(range(1, row.ndim)))
    return total


def _trust(square: jax.Array) -> jax.Array:
    return (square >= _TRUSTED[0]) & (square <= _TRUSTED[1])


def _squares(factor: jax.Array) -> jax.Array:
    """Squared norms (B, K) of a factor."""
    if indexed(factor):
        return jnp.full(factor.shape[:2], factor.shape[2], jnp.float32)
    return jnp.sum(jnp.square(factor.astype(wide(factor))), axis=(2, 3)).astype(jnp.float32)


def _inner(a: jax.Array, b: jax.Array) -> jax.Array:
    """All inner products of positions, (B, K, T, T'), at full precision: norms rest on them."""
    if indexed(a) and indexed(b):
        return (a[..., :, None] == b[..., None, :]).astype(jnp.float32)
    if indexed(b):
        return _inner(b, a).swapaxes(-1, -2)
    if indexed(a):
        picked = jnp.take_along_axis(b, a[..., None, :], axis=-1)  # (B, K, T', T)
        return picked.swapaxes(-1, -2).astype(jnp.float32)
    return jnp.einsum(
        "bktr,bksr->bkts",
        a,
        b,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=wide(a, b),
    ).astype(jnp.float32)


def weighted_sum(
    segments: list[Segment], weights: jax.Array, sizes: tuple[int, int, int]
) -> jax.Array:
    """Σ_i weights[i] G_i, (K, R, C) in float32 at least, for weights (B,) or (B, K)."""
    total = None
    for segment in segments:
        factor = weights if segment.weight is None else weights * segment.weight
        part = _weighted(segment.rows, segment.columns, factor, sizes)
        total = part if total is None else total + part
    assert total is not None
    return total


def _weighted(
    rows: jax.Array, columns: jax.Array, weights: jax.Array, sizes: tuple[int, int, int]
) -> jax.Array:
    if indexed(rows):
        scaled = _times(columns.astype(wide(columns)), weights)
        return _scatter(_together(rows), _together(scaled), sizes[1])[0]
    if indexed(columns):
        return _weighted(columns, rows, weights, (sizes[0], *sizes[:0:-1])).swapaxes(-1, -2)
    scale_rows = math.prod(rows.shape) < math.prod(columns.shape)  # the smaller of the two
    scaled = _times((rows if scale_rows else columns).astype(wide(rows, columns)), weights)
    if scale_rows:
        return _contract(_together(scaled)[0], _together(columns)[0])
    return _contract(_together(rows)[0], _together(scaled)[0])


def _together(factor: jax.Array) -> jax.Array:
    """(B, K, T, ...) to (1, K, B T, ...)."""
    batch, groups, positions = factor.shape[:3]
    moved = factor if groups == 1 else factor.swapaxes(0, 1)
    return moved.reshape(1, groups, batch * positions, *factor.shape[3:])


def _contract(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """rowsᵀ columns, (K, R, C), in the narrower dtype of the two; the other holds clip factors.

    In 16 bits the factors would round, and push a contribution past the clip bound: what holds
    them goes in two parts, which keep 16 bits of the mantissa.
    """
    dtype = wide(rows, columns)

    def dot(rows: jax.Array, columns: jax.Array) -> jax.Array:
        if rows.shape[0] == 1:
            return jnp.dot(rows[0].T, columns[0], preferred_element_type=dtype)[None]
        return jnp.einsum("ktr,ktc->krc", rows, columns, preferred_element_type=dtype)

    def parts(factor: jax.Array, narrow: jnp.dtype) -> list[jax.Array]:
        if factor.dtype == narrow:
            return [factor]
        high = factor.astype(narrow)
        return [high, (factor - high.astype(factor.dtype)).astype(narrow)]

    narrow = min(rows.dtype, columns.dtype, key=lambda d: d.itemsize)
    if narrow.itemsize >= 4:
        return dot(rows, columns)
    pairs = [(r, c) for r in parts(rows, narrow) for c in parts(columns, narrow)]
    total = dot(*pairs[0])
    for pair in pairs[1:]:
        total += dot(*pair)
    return total


def unit_outer(segment: Segment) -> tuple[Segment, jax.Array, jax.Array]:
    """The product of one position (T = 1) with factors scaled to entries of at most 1.

    Returns:
      The scaled factors u, v, zero where they were not finite; the scale τ = max|G_i[k]|, (B, K),
      which is not finite where a factor is not; and the norms ‖u‖‖v‖, (B, K), at least 1 where τ is
      positive. G_i[k] = τ uᵀ v, and nothing in it can cancel, overflow or underflow but τ.
    """

    def unit(factor: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if indexed(factor):
            ones = jnp.ones(factor.shape[:2], jnp.float32)
            return factor, ones, ones
        factor = factor.astype(wide(factor))
        top = jnp.max(jnp.abs(factor), axis=(2, 3))
        safe = jnp.isfinite(top) & (top > 0)
        scaled = factor / jnp.where(safe, top, 1.0)[:, :, None, None]
        scaled = jnp.where(safe[:, :, None, None], scaled, 0.0)
        return scaled, top, jnp.sqrt(jnp.sum(jnp.square(scaled), axis=(2, 3)))

    weighted = [segment.rows, segment.columns]
    dense = 0 if indexed(segment.columns) else 1
    weighted[dense] = _times(weighted[dense].astype(wide(weighted[dense])), segment.weight)
    (rows, row_top, row_norm), (columns, column_top, column_norm) = map(unit, weighted)
    return Segment(rows, columns), row_top * column_top, row_norm * column_norm


def largest(segments: list[Segment]) -> jax.Array:
    """max|rows| and max|columns|, (2, B); NaN where there is one, 1 for one-hot factors."""

    def one(factor: jax.Array) -> jax.Array:
        if indexed(factor):
            return jnp.ones(factor.shape[0], jnp.float32)
        return jnp.max(jnp.abs(factor), axis=(1, 2, 3)).astype(jnp.float32)

    return jnp.stack([
        jnp.max(jnp.stack([one(s.rows) for s in segments]), axis=0),
        jnp.max(jnp.stack([one(s.columns) for s in segments]), axis=0),
    ])  # fmt: skip
