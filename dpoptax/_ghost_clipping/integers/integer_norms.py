"""Certifies the norms of gradients in integers, exactly."""

import functools
import math
import operator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._ghost_clipping.cost_model import COSTS
from dpoptax._ghost_clipping.integers.integer_products import (
    DIGIT_BITS,
    INTEGER_TERMS,
    IntegerFactors,
    form,
    is_index,
    low_digit,
    multiply_digits,
)
from dpoptax._losses.rules import Sizes
from dpoptax._rounding import wide_integers
from dpoptax._rounding.bounds import broadcast_examples

# 2^bits (positive − negative) is added to a squared norm; wide integers (8, B). None is zero.
Term: TypeAlias = tuple[int, jax.Array, jax.Array | None]


def certify(terms: list[Term], largest_square: int) -> jax.Array:
    """Returns whether squared norms, sums of terms, are at most `largest_square`, (B,)."""
    added = [(bits, positive) for bits, positive, _ in terms]
    subtracted = [(bits, negative) for bits, _, negative in terms if negative is not None]
    limit = wide_integers.constant(largest_square)[:, None]
    subtracted.append((0, jnp.broadcast_to(limit, added[0][1].shape)))

    def total(parts: list[tuple[int, jax.Array]]) -> jax.Array:
        bits, values = zip(*parts, strict=True)
        factors = jnp.stack([wide_integers.constant(2**each) for each in bits], axis=-1)
        stacked = jnp.stack(values, axis=-1)
        factors = jnp.broadcast_to(factors[:, None], stacked.shape)
        return wide_integers.total(wide_integers.multiply(stacked, factors))

    return wide_integers.at_most(total(added), total(subtracted))


def square_norms(uses: list[IntegerFactors], sizes: Sizes, method: str) -> list[Term]:
    """Returns terms whose sum is the squared norm of contributions."""
    examples = uses[0].columns.shape[0]
    alone = len(uses) == 1 and uses[0].columns.shape[2] == 1
    if alone and not is_index(uses[0].rows):
        rows, columns = (
            wide_integers.sum_of_squares(x[:, :, 0]) for x in (uses[0].rows, uses[0].columns)
        )
        return [(0, wide_integers.total(wide_integers.multiply(rows, columns)), None)]
    # One-hot rows are compared, not summed, so a table may have more rows.
    dense = [x for use in uses for x in (use.rows, use.columns) if not is_index(x)]
    if method != "form" and max(x.shape[-1] for x in dense) <= INTEGER_TERMS:
        return _gram_square_norms(uses)
    most = max(1, COSTS.formed_entries // math.prod(sizes))
    part = next(n for n in range(min(most, examples), 0, -1) if examples % n == 0)

    def formed_square(uses: list[IntegerFactors]) -> jax.Array:
        contribution = functools.reduce(operator.add, map(form, uses))
        return wide_integers.sum_of_squares(contribution.reshape(part, -1))

    parts = jax.tree.map(lambda x: x.reshape(-1, part, *x.shape[1:]), uses)
    found = lax.map(formed_square, parts).swapaxes(0, 1)  # (8, parts, part)
    return [(0, found.reshape(found.shape[0], examples), None)]


def _gram_square_norms(uses: list[IntegerFactors]) -> list[Term]:
    """Returns the same from inner products of positions, which have at most 2¹⁶ terms."""
    terms: list[Term] = []
    for i, a in enumerate(uses):
        for j, b in enumerate(uses[i:], i):
            (a_rows, a_columns), (b_rows, b_columns) = _sides(a), _sides(b)
            for row_bits, rows in _digit_products(a_rows, b_rows, same=i == j):
                for column_bits, columns in _digit_products(a_columns, b_columns, same=i == j):
                    flat = (x.reshape(x.shape[0], -1) for x in (rows, columns))
                    # Each pair of different uses occurs twice.
                    bits = row_bits + column_bits + int(i != j)
                    terms.append((bits, *wide_integers.inner_products(*flat)))
    return terms


class _Side(NamedTuple):
    """Holds a side of an outer product: indices, or digits in int8 with the bits below them."""

    digits: list[tuple[int, jax.Array]]
    scale: jax.Array


def _sides(use: IntegerFactors) -> tuple[_Side, _Side]:
    """Returns rows and columns of a use."""
    low = low_digit(use.columns)
    high = ((use.columns - low) >> DIGIT_BITS).astype(jnp.int8)
    rows = _Side([(0, use.rows)], use.scale)
    columns = _Side([(DIGIT_BITS, high), (0, low.astype(jnp.int8))], use.scale)
    return (columns, rows) if use.swapped else (rows, columns)


def _digit_products(a: _Side, b: _Side, *, same: bool) -> list[tuple[int, jax.Array]]:
    """Returns the inner products of positions, (B, K, L, L′) int32, with the bits below them.

    For the `same` side twice, ⟨high, low′⟩ and ⟨low, high′⟩ are transposed. Multiplied by a
    symmetric matrix they have one sum, which is counted twice.
    """
    found = []
    for i, (a_bits, x) in enumerate(a.digits):
        for j, (b_bits, y) in enumerate(b.digits):
            if not same or i <= j:
                doubled = int(same and i < j)
                found.append((a_bits + b_bits + doubled, _position_products(a, b, x, y)))
    return found


def _position_products(a: _Side, b: _Side, x: jax.Array, y: jax.Array) -> jax.Array:
    if is_index(y) and not is_index(x):
        return _position_products(b, a, y, x).swapaxes(-1, -2)
    if is_index(x):
        if is_index(y):
            found = (x[..., :, None] == y[..., None, :]).astype(jnp.int32)
            found *= broadcast_examples(b.scale, found)
        else:
            found = jnp.take_along_axis(y, x[..., None, :], -1, mode="fill", fill_value=0)
            found = found.swapaxes(-1, -2).astype(jnp.int32)
        return found * broadcast_examples(a.scale, found)
    return multiply_digits(x.swapaxes(-1, -2), y.swapaxes(-1, -2))
