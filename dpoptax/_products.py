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
# One number written to memory and read back costs as much time as about this many multiply-adds.
_MEMORY = 60


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """Factors of one use: `rows` (B, K, T, R), `columns` (B, K, T, C); integers (B, K, T)."""

    rows: jax.Array
    columns: jax.Array

    @property
    def swapped(self) -> "Segment":
        return Segment(self.columns, self.rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Size:
    """Per example: a norm, an upper bound of the terms it was summed from, and whether to trust it.

    The bound is ΣΣ‖rows_t‖‖columns_t‖: rounding errors are small against it, so a norm far below
    it may be all error.
    """

    norm: jax.Array
    bound: jax.Array
    trusted: jax.Array


def indexed(factor: jax.Array) -> bool:
    """Whether a factor is one-hot, held as integers."""
    return jnp.issubdtype(factor.dtype, jnp.integer)


def wide(*arrays: jax.Array) -> jnp.dtype:
    """The dtype to accumulate in: float32, or that of the arrays where it is wider."""
    floats = [a.dtype for a in arrays if not indexed(a)]
    return jnp.result_type(jnp.float32, *floats)


def choose(batch: int, positions: int, rows: int, columns: int, *, single: bool) -> str:
    """The cheapest way to the norm of products with `positions` = Σ_s T_s, for dense factors.

    Returns "outer" (one position: the product of two norms), "gram", "form" (form the gradients,
    contract again for the sum) or "keep" (form them and keep them for the sum).
    """
    if positions == 1 and single:
        return "outer"
    size, work = rows * columns, positions * rows * columns
    cost = {"gram": positions**2 * (rows + columns) + work, "form": 2 * work + _MEMORY * size / 2}
    if size <= 2 * positions * (rows + columns) or batch * size <= 2**16:
        cost["keep"] = work + _MEMORY * size
    return min(cost, key=cost.__getitem__)


def form(segments: list[Segment], sizes: tuple[int, int, int]) -> jax.Array:
    """The gradients themselves, (B, K, R, C) in float32."""
    total = None
    for segment in segments:
        rows, columns = segment.rows, segment.columns
        if indexed(rows):
            part = _scatter(rows, columns, sizes[1])
        elif indexed(columns):
            part = _scatter(columns, rows, sizes[2]).swapaxes(-1, -2)
        else:
            part = jnp.einsum(
                "bktr,bktc->bkrc", rows, columns, preferred_element_type=wide(rows, columns)
            )
        total = part if total is None else total + part
    assert total is not None
    return total


def _scatter(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
    def add(index: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((size, values.shape[-1]), wide(values))
        return zeros.at[index].add(values.astype(zeros.dtype))

    return jax.vmap(jax.vmap(add))(index, values)


def size_of(gradient: jax.Array) -> Size:
    """The size of formed gradients, (B, ...)."""
    gradient = gradient.astype(wide(gradient))
    square = jnp.sum(jnp.square(gradient), axis=tuple(range(1, gradient.ndim)))
    square = square.astype(jnp.float32)
    norm = jnp.sqrt(square)
    return Size(norm, norm, _trust(square))


def measure(segments: list[Segment], method: str, sizes: tuple[int, int, int]) -> Size:
    """The size of products, by "outer", "gram" or "form"."""
    if method == "form":
        return size_of(form(segments, sizes))
    if method == "outer":
        (segment,) = segments
        rows, columns = (_squares(x) for x in (segment.rows, segment.columns))
        return _combine(rows, columns, [(1.0, rows, columns)], exact=True)
    grams = []
    for i, a in enumerate(segments):
        for j, b in enumerate(segments[i:], i):
            twice = 1.0 if i == j else 2.0
            grams.append((twice, _inner(a.rows, b.rows), _inner(a.columns, b.columns)))
    squares = [(_squares(s.rows), _squares(s.columns)) for s in segments]
    rows = jnp.concatenate([r for r, _ in squares], axis=-1)
    columns = jnp.concatenate([c for _, c in squares], axis=-1)
    return _combine(rows, columns, grams, exact=False)


def _combine(rows: jax.Array, columns: jax.Array, grams: list, *, exact: bool) -> Size:
    """Size from squared norms (B, K, T) and inner products; scaled, since squares multiply."""
    largest = [jnp.max(x, axis=(1, 2)) for x in (rows, columns)]
    safe = [jnp.where(x > 0, x, 1.0) for x in largest]
    unit = [1 / x for x in safe]
    roots = jnp.sqrt(safe[0]) * jnp.sqrt(safe[1])
    total = jnp.zeros(rows.shape[0], jnp.float32)
    for times, inner_rows, inner_columns in grams:
        scale = [u.reshape(-1, *(1,) * (inner_rows.ndim - 1)) for u in unit]
        product = (inner_rows * scale[0]) * (inner_columns * scale[1])
        total += times * jnp.sum(product, axis=tuple(range(1, product.ndim)))
    norm = roots * jnp.sqrt(jnp.maximum(total, 0.0))
    if exact:
        bound = norm
    else:
        terms = jnp.sqrt(rows * unit[0][:, None, None]) * jnp.sqrt(columns * unit[1][:, None, None])
        bound = roots * jnp.sqrt(jnp.sum(jnp.square(jnp.sum(terms, axis=2)), axis=1))
    # Where one use has large rows and another large columns, the scaled terms can all be tiny.
    return Size(norm, bound, _trust(largest[0]) & _trust(largest[1]) & (total >= _LEAST))


def _trust(square: jax.Array) -> jax.Array:
    return (square >= _TRUSTED[0]) & (square <= _TRUSTED[1])


def _squares(factor: jax.Array) -> jax.Array:
    """Squared norms (B, K, T) of the positions of a factor."""
    if indexed(factor):
        return jnp.ones(factor.shape, jnp.float32)
    return jnp.sum(jnp.square(factor.astype(wide(factor))), axis=-1).astype(jnp.float32)


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


def weighted_sum(segments: list[Segment], weights: jax.Array, sizes: tuple[int, int, int]):
    """Σ_i weights[i] G_i, (K, R, C) in float32."""
    total = None
    for segment in segments:
        rows, columns = segment.rows, segment.columns
        flip = indexed(columns) or (
            not indexed(rows) and math.prod(rows.shape) < math.prod(columns.shape)
        )
        rows, columns = (columns, rows) if flip else (rows, columns)
        scaled = columns.astype(wide(columns)) * weights[:, None, None, None]
        if indexed(rows):
            count = sizes[2] if flip else sizes[1]
            part = _scatter(_together(rows), _together(scaled), count)[0]
        else:
            part = _contract(_together(rows)[0], _together(scaled)[0])
        part = part.swapaxes(-1, -2) if flip else part
        total = part if total is None else total + part
    assert total is not None
    return total


def _together(factor: jax.Array) -> jax.Array:
    """(B, K, T, ...) to (1, K, B T, ...)."""
    batch, groups, positions = factor.shape[:3]
    moved = factor if groups == 1 else factor.swapaxes(0, 1)
    return moved.reshape(1, groups, batch * positions, *factor.shape[3:])


def _contract(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Contraction in the dtype of `rows`; `columns` carry clip factors and are wide.

    In 16 bits the factors would round, and push a contribution past the clip bound: the columns
    go in two parts, which hold 16 bits of the mantissa.
    """
    dtype = wide(rows, columns)

    def dot(columns: jax.Array) -> jax.Array:
        if rows.shape[0] == 1:
            return jnp.dot(rows[0].T, columns[0], preferred_element_type=dtype)[None]
        return jnp.einsum("ktr,ktc->krc", rows, columns, preferred_element_type=dtype)

    if rows.dtype.itemsize >= 4:
        return dot(columns)
    high = columns.astype(rows.dtype)
    low = (columns - high.astype(jnp.float32)).astype(rows.dtype)
    return dot(high) + dot(low)


def largest(segments: list[Segment]) -> tuple[jax.Array, jax.Array]:
    """max|rows| and max|columns| per example; NaN where there is one, 1 for one-hot factors."""

    def one(factor: jax.Array) -> jax.Array:
        if indexed(factor):
            return jnp.ones(factor.shape[0], jnp.float32)
        return jnp.max(jnp.abs(factor), axis=(1, 2, 3)).astype(jnp.float32)

    return (
        jnp.max(jnp.stack([one(s.rows) for s in segments]), axis=0),
        jnp.max(jnp.stack([one(s.columns) for s in segments]), axis=0),
    )
