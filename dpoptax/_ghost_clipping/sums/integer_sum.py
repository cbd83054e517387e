"""Sums clipped gradients as integers, with an exact bound of each contribution.

The factors of example i are rounded to integers: rows R_t of 8 bits, and weighted columns W_t of 16
bits. Its contribution is the array A_i = Σ_t R_t ⊗ W_t, in units of the grid g. Products and sums
of integers are exact on every device. ‖A_i‖² is computed from the stored integers, exactly. An
example with a norm above the limit contributes zero. So the bound does not depend on the numbers
before, or on their rounding (docs/developers/exact-sums.md).

Coefficients leave room for the expected rounding, so that no example of a real data set is lost.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clip import wide_integers
from dpoptax._clip.bounds import NormBounds, broadcast_examples, power_of_two
from dpoptax._clip.clip import Clip
from dpoptax._ghost_clipping.cost_model import COSTS
from dpoptax._ghost_clipping.norms.factor_products import FactoredGradients, Segment, is_one_hot
from dpoptax._ghost_clipping.trace.rules import Sizes
from dpoptax._tree import widen
from dpoptax._xla import materialize

# Rows have entries below 2. Times at most 2⁶, they have 7 bits and a sign.
_ROW_BITS = 6
_LARGEST_ROW = 2.0**7 - 1.0
# Columns are 2⁸ high + low, with two digits in int8.
_DIGIT_BITS = 8
_LARGEST_COLUMN = 127.0 * 2.0**8
# The largest C/g. Columns next to rows times 2⁶ are then at most 2¹⁴, for one position.
_FINEST_GRID = 2.0**20
# Formed gradients. Larger entries exceed every limit.
_LARGEST_ENTRY = 2.0**30
# Products of int8 are at most 2¹⁴, so sums of 2¹⁰ are exact in float32, and sums of 2¹⁶ in int32.
_EXACT_TERMS = 2**10
_INTEGER_TERMS = 2**16
# Rounding up or down at random has a variance of at most 1/4. Coefficients leave room for this
# many standard deviations.
_VARIANCE = 0.25
_DEVIATIONS = 4.0


@dataclasses.dataclass(frozen=True)
class IntegerGrid:
    """Describes the integers of a sum.

    Attributes:
      step: g, a power of two. Contributions are g times integers.
      largest_square: an integer, the limit of a contribution's squared norm.
    """

    step: float
    largest_square: int


def make_grid(step: float, clip: Clip, entries: int) -> IntegerGrid:
    """Returns the grid of sums over d `entries`.

    A contribution is at most C + √d g/2 long, the sensitivity of any sum on a grid, and at most
    2 C. Sums then fit into int32, because `check_capacity` limits B C/g to 2³⁰.

    Raises:
      ValueError: the grid is too fine for columns of 16 bits.
    """
    bound = clip.sensitivity / step
    if bound > _FINEST_GRID:
        raise ValueError(
            f"method='integers' needs a grid of at least 2⁻²⁰ C, got grid={step} for sensitivity "
            f"{clip.sensitivity}. Use a `noise_multiplier` of at least 1/4, or method='vmap'."
        )
    limit = min(bound + 0.5 * math.sqrt(entries), 2.0 * bound)
    # Smaller by more than the rounding of double precision.
    return IntegerGrid(step, int(limit**2 * (1.0 - 2.0**-48)))


# 2^bits (positive − negative) is added to a squared norm; wide integers (8, B). None is zero.
Term: TypeAlias = tuple[int, jax.Array, jax.Array | None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IntegerFactors:
    """Holds the integer factors of one use.

    Attributes:
      rows: (B, K, L, R) int8, or the indices of one-hot rows, (B, K, L) int32.
      columns: (B, K, L, D) int16, times the coefficient.
      scale: the entry of one-hot rows, (B,) int32.
      size: the length of a row.
      swapped: whether the contribution is transposed.
    """

    rows: jax.Array
    columns: jax.Array
    scale: jax.Array
    size: int = dataclasses.field(metadata={"static": True})
    swapped: bool = dataclasses.field(metadata={"static": True})


def sum_integers(
    products: list[FactoredGradients],
    methods: list[str],
    formed: list[jax.Array],
    bounds: list[NormBounds],
    coefficients: list[jax.Array],
    grid: IntegerGrid,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums of clipped gradients in int32, in units of the grid.

    Args:
      products: gradients given by factors.
      methods: the methods for their norms: "outer", "gram" or "form".
      formed: formed gradients, (B, entries).
      bounds: the bounds of the norms, of products and then of formed gradients.
      coefficients: the coefficients in the same order, (B,) each. They do not affect privacy.
      grid: the unit of the sum, and the limit of a contribution.

    Returns:
      The sum of each product, (K, R, D), and of each formed gradient, (entries,).
    """
    weights = [each * (1.0 / grid.step) for each in coefficients]
    scales = [
        [_row_scale(segment, weight) for segment in factored.segments]
        for factored, weight in zip(products, weights, strict=False)
    ]
    room = _room(products, scales, formed, bounds, weights, grid)
    factors = [
        [
            _round_segment(segment, scale, room * weight, factored.sizes)
            for segment, scale in zip(factored.segments, each, strict=True)
        ]
        for factored, each, weight in zip(products, scales, weights, strict=False)
    ]
    arrays = [
        _round(_weigh(x, room * weight), _LARGEST_ENTRY, jnp.int32)
        for x, weight in zip(formed, weights[len(products) :], strict=True)
    ]
    # The norm and the sum must read the same integers.
    factors, arrays = materialize((factors, arrays), jnp.integer)
    terms: list[Term] = [(0, wide_integers.sum_of_squares(x), None) for x in arrays]
    for uses, factored, method in zip(factors, products, methods, strict=True):
        terms += _square_norms(uses, factored.sizes, method)
    kept = _certify(terms, grid)
    sums = [functools.reduce(operator.add, [_sum(each, kept) for each in uses]) for uses in factors]
    return sums, [jnp.sum(_select(kept, x), axis=0, dtype=jnp.int32) for x in arrays]


def _certify(terms: list[Term], grid: IntegerGrid) -> jax.Array:
    """Returns whether squared norms, sums of terms, are at most the limit of the grid, (B,)."""
    added = [(bits, positive) for bits, positive, _ in terms]
    subtracted = [(bits, negative) for bits, _, negative in terms if negative is not None]
    limit = wide_integers.constant(grid.largest_square)[:, None]
    subtracted.append((0, jnp.broadcast_to(limit, added[0][1].shape)))

    def total(parts: list[tuple[int, jax.Array]]) -> jax.Array:
        bits, values = zip(*parts, strict=True)
        factors = jnp.stack([wide_integers.constant(2**each) for each in bits], axis=-1)
        stacked = jnp.stack(values, axis=-1)
        factors = jnp.broadcast_to(factors[:, None], stacked.shape)
        return wide_integers.total(wide_integers.multiply(stacked, factors))

    return wide_integers.at_most(total(added), total(subtracted))


def _row_scale(segment: Segment, weight: jax.Array) -> jax.Array:
    """Returns powers of two that rows are multiplied by, (B,), from 1 to 2⁶.

    For rows r with R entries and weighted columns w with D entries, the rounding errors of the
    product are in proportion to D ‖r‖² + R ‖w‖². The scale makes the two terms equal.
    """
    if any(map(is_one_hot, segment)):  # which are not rounded
        return jnp.full_like(weight, 2.0**_ROW_BITS)
    rows, columns = segment
    ratio = rows.shape[-1] * _square(columns) * jnp.square(weight)
    ratio /= columns.shape[-1] * _square(rows)
    # Zero and NaN become the smallest scale.
    exponent = jnp.rint(0.25 * jnp.log2(jnp.where(ratio > 1.0, ratio, 1.0)))
    return power_of_two(jnp.minimum(exponent, _ROW_BITS).astype(jnp.int32))


def _room(
    products: list[FactoredGradients],
    scales: list[list[jax.Array]],
    formed: list[jax.Array],
    bounds: list[NormBounds],
    weights: list[jax.Array],
    grid: IntegerGrid,
) -> jax.Array:
    """Returns factors of at most 1, (B,), that leave room for rounding below the limit.

    With independent errors, the expected squared norm grows by `spread`, and the norm has a
    standard deviation of at most the root of `aligned`.
    """
    square = spread = aligned = jnp.zeros_like(weights[0])
    for bound, weight in zip(bounds, weights, strict=True):
        square += bound.square * jnp.square(weight)
    for factored, each, weight in zip(products, scales, weights, strict=False):
        for segment, scale in zip(factored.segments, each, strict=True):
            rows, columns = segment.swapped if is_one_hot(segment.columns) else segment
            if is_one_hot(rows):
                spread += _VARIANCE * columns[0].size * jnp.square(scale)
                aligned += _VARIANCE * columns.shape[2] * jnp.square(scale)
                continue
            row_square = _square(rows) * jnp.square(scale)
            column_square = _square(columns) * jnp.square(weight / scale)
            spread += _VARIANCE * (columns.shape[-1] * row_square + rows.shape[-1] * column_square)
            aligned += _VARIANCE * (row_square + column_square)
    for x in formed:
        spread += _VARIANCE * x[0].size
        aligned += _VARIANCE
    expected = jnp.sqrt(square + spread) + _DEVIATIONS * jnp.sqrt(aligned)
    limit = math.sqrt(grid.largest_square)
    return jnp.where(expected > 0.0, jnp.minimum(1.0, limit / expected), 0.0)


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(widen(x)), axis=tuple(range(1, x.ndim)))


def _weigh(x: jax.Array, weights: jax.Array) -> jax.Array:
    return widen(x) * broadcast_examples(weights, x)


def _round(x: jax.Array, largest: float, dtype: DTypeLike) -> jax.Array:
    """Rounds (B, …) up or down, to integers of at most `largest`; NaN becomes zero.

    A number is rounded up with a probability of its fraction, so that rounding errors of equal
    numbers do not add up. The random numbers are hashes of the place and of all bits of the
    example's numbers. They do not affect privacy.
    """
    x = jnp.where(jnp.isnan(x), 0.0, x).astype(jnp.float32)
    axes = tuple(range(1, x.ndim))
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    word = broadcast_examples(jnp.sum(bits, axis=axes, dtype=jnp.uint32), x)
    for axis in axes:
        place = lax.broadcasted_iota(jnp.uint32, (1, *x.shape[1:]), axis)
        word = _mix(word + place)
    up = (word >> 8).astype(jnp.float32) * 2.0**-24
    return jnp.clip(jnp.floor(x + up), -largest, largest).astype(dtype)


def _mix(word: jax.Array) -> jax.Array:
    """Hashes uint32: the finalizer of MurmurHash3."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def _round_segment(
    segment: Segment, scale: jax.Array, weight: jax.Array, sizes: Sizes
) -> IntegerFactors:
    """Rounds the factors of one use: rows times `scale`, columns times `weight`/`scale`."""
    swapped = is_one_hot(segment.columns)
    rows, columns = segment.swapped if swapped else segment
    size = sizes[2] if swapped else sizes[1]
    if is_one_hot(rows):
        # Equal rows have equal indices. Indices beyond the end are left out.
        found = jnp.where(rows < 0, rows + size, rows)
        found = jnp.where((found < 0) | (found >= size), size, found).astype(jnp.int32)
    else:
        found = _round(_weigh(rows, scale), _LARGEST_ROW, jnp.int8)
    columns = _round(_weigh(columns, weight / scale), _LARGEST_COLUMN, jnp.int16)
    return IntegerFactors(found, columns, scale.astype(jnp.int32), size, swapped)


def _square_norms(uses: list[IntegerFactors], sizes: Sizes, method: str) -> list[Term]:
    """Returns terms whose sum is the squared norm of contributions."""
    examples = uses[0].columns.shape[0]
    if method == "outer" and not _is_index(uses[0].rows):
        rows, columns = (
            wide_integers.sum_of_squares(x[:, :, 0]) for x in (uses[0].rows, uses[0].columns)
        )
        return [(0, wide_integers.total(wide_integers.multiply(rows, columns)), None)]
    if method != "form" and max(sizes[1:]) <= _INTEGER_TERMS:
        return _gram_square_norms(uses)
    most = max(1, COSTS.formed_entries // math.prod(sizes))
    part = next(n for n in range(min(most, examples), 0, -1) if examples % n == 0)

    def square_norms(uses: list[IntegerFactors]) -> jax.Array:
        contribution = functools.reduce(operator.add, map(_form, uses))
        return wide_integers.sum_of_squares(contribution.reshape(part, -1))

    parts = jax.tree.map(lambda x: x.reshape(-1, part, *x.shape[1:]), uses)
    found = lax.map(square_norms, parts).swapaxes(0, 1)  # (8, parts, part)
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
    low = _low_digit(use.columns)
    high = ((use.columns - low) >> _DIGIT_BITS).astype(jnp.int8)
    rows = _Side([(0, use.rows)], use.scale)
    columns = _Side([(_DIGIT_BITS, high), (0, low.astype(jnp.int8))], use.scale)
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
    if _is_index(y) and not _is_index(x):
        return _position_products(b, a, y, x).swapaxes(-1, -2)
    if _is_index(x):
        if _is_index(y):
            found = (x[..., :, None] == y[..., None, :]).astype(jnp.int32)
            found *= broadcast_examples(b.scale, found)
        else:
            found = jnp.take_along_axis(y, x[..., None, :], -1, mode="fill", fill_value=0)
            found = found.swapaxes(-1, -2).astype(jnp.int32)
        return found * broadcast_examples(a.scale, found)
    return _multiply_digits(x.swapaxes(-1, -2), y.swapaxes(-1, -2))


def _is_index(rows: jax.Array) -> bool:
    """Returns whether rows are one-hot, given by their indices."""
    return rows.dtype == jnp.int32


def _scatter(index: jax.Array, values: jax.Array, size: int) -> jax.Array:
    """Adds values (B, K, L, D) to rows of zeros, (B, K, size, D)."""

    def add(index: jax.Array, values: jax.Array) -> jax.Array:
        zeros = jnp.zeros((size, values.shape[-1]), jnp.int32)
        return zeros.at[index].add(values, mode="drop")

    return jax.vmap(jax.vmap(add))(index, values)


def _form(use: IntegerFactors) -> jax.Array:
    """Returns the contributions of examples, (B, K, R, D) int32."""
    if _is_index(use.rows):
        found = _scatter(use.rows, _scaled_columns(use), use.size)
    else:
        found = _multiply(use.rows, use.columns)
    return found.swapaxes(-1, -2) if use.swapped else found


def _sum(use: IntegerFactors, kept: jax.Array) -> jax.Array:
    """Returns the sum of the contributions of examples that are kept, (K, R, D) int32."""
    columns = _scaled_columns(use) if _is_index(use.rows) else use.columns
    joined = dataclasses.replace(
        use,
        rows=_join_examples(use.rows),
        columns=_join_examples(_select(kept, columns)),
        scale=jnp.ones(1, jnp.int32),
    )
    return _form(joined)[0]


def _scaled_columns(use: IntegerFactors) -> jax.Array:
    """Returns columns times the entry of one-hot rows."""
    return use.columns.astype(jnp.int32) * broadcast_examples(use.scale, use.columns)


def _select(kept: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(broadcast_examples(kept, x), x, 0)


def _join_examples(factor: jax.Array) -> jax.Array:
    """Reshapes (B, K, L, …) to (1, K, B L, …)."""
    examples, groups, positions = factor.shape[:3]
    return factor.swapaxes(0, 1).reshape(1, groups, examples * positions, *factor.shape[3:])


def _multiply(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns Σ_t rows_t ⊗ columns_t modulo 2³², for int8 (…, T, R) and int16 (…, T, D)."""
    low = _low_digit(columns)
    high = (columns - low) >> _DIGIT_BITS
    return 2**_DIGIT_BITS * _multiply_digits(rows, high) + _multiply_digits(rows, low)


def _low_digit(columns: jax.Array) -> jax.Array:
    """Returns the numbers from −2⁷ to 2⁷ − 1 that equal int16 modulo 2⁸."""
    return ((columns + 128) & 255) - 128


def _multiply_digits(rows: jax.Array, digits: jax.Array) -> jax.Array:
    """Returns products of matrices in int8, (…, R, D) int32.

    XLA's integer products are slow on CPU. There, short sums are exact in float32.
    """
    found: jax.Array = lax.platform_dependent(
        rows,
        digits.astype(jnp.int8),
        cpu=functools.partial(_multiply_in_blocks, kind=jnp.float32, length=_EXACT_TERMS),
        default=functools.partial(_multiply_in_blocks, kind=jnp.int32, length=_INTEGER_TERMS),
    )
    return found


def _multiply_in_blocks(a: jax.Array, b: jax.Array, *, kind: DTypeLike, length: int) -> jax.Array:
    """Multiplies matrices (B, K, T, …) with sums of at most `length` products, in dtype `kind`."""
    positions = a.shape[2]
    operand = kind if kind == jnp.float32 else jnp.int8

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        found = jnp.einsum(
            "bktr,bktd->bkrd",
            a.astype(operand),
            b.astype(operand),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=kind,
        )
        return found.astype(jnp.int32)

    if positions <= length:
        return dot(a, b)
    blocks = -(-positions // length)
    padding = [(0, 0), (0, 0), (0, blocks * length - positions), (0, 0)]
    a, b = (jnp.pad(x, padding) for x in (a, b))

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        a_block, b_block = (lax.dynamic_slice_in_dim(x, i * length, length, 2) for x in (a, b))
        return total + dot(a_block, b_block)

    return lax.fori_loop(
        0, blocks, add, jnp.zeros((*a.shape[:2], a.shape[3], b.shape[3]), jnp.int32)
    )
