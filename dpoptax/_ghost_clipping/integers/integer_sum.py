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
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from dpoptax._clips.clip import Clip
from dpoptax._clips.encoding import scaling
from dpoptax._ghost_clipping.integers.integer_norms import Term, certify, square_norms
from dpoptax._ghost_clipping.integers.integer_products import (
    DIGIT_BITS,
    IntegerFactors,
    select,
    sum_kept,
)
from dpoptax._ghost_clipping.norms.factor_products import (
    FactoredGradients,
    Segment,
    is_one_hot,
)
from dpoptax._ghost_clipping.sums.ghost_clipped_sum import (
    ClippedTotal,
    GradientSums,
    ghost_clipped_sum,
    make_pieces,
    place_sums,
)
from dpoptax._ghost_clipping.sums.scaled_gradients import ScaledGradients
from dpoptax._ghost_clipping.sums.weighted_products import weigh_values
from dpoptax._losses.program import Program
from dpoptax._losses.rules import Sizes
from dpoptax._losses.trace_loss import Examples
from dpoptax._points.points import GradientPoints
from dpoptax._rounding import bounds, wide_integers
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._rounding.bounds import (
    NormBounds,
    Piece,
    binary_exponent,
    broadcast_examples,
    largest_entry,
    power_of_two,
)
from dpoptax._support.mixing import mixed
from dpoptax._support.tree import PyTree, widen
from dpoptax._support.xla import materialize, unstack

# Exponents of 2. Scaled rows have entries below 2⁷, so 7 bits and a sign. The columns of lookups
# have entries below 2¹⁴, next to rows times at most 2⁶. Rows that are almost zero are scaled less.
_ROW_BITS, _LOOKUP_BITS, _LARGEST_SCALE = 6, 13, 30
_LARGEST_ROW = 2.0**7 - 1.0
_LARGEST_COLUMN = 127.0 * 2.0**DIGIT_BITS
# The largest C/g. Columns next to rows times 2⁶ are then at most 2¹⁴, for one position.
_FINEST_GRID = 2.0**20
# M, because sums of integers are exact whatever the absolute size of their terms.
_UNLIMITED = 2.0**30
# Formed gradients. Larger entries exceed every limit.
_LARGEST_ENTRY = 2.0**30
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


def integer_clipped_sum(
    program: Program,
    clip: Clip,
    points: GradientPoints,
    examples: Examples,
    *,
    grid: float,
    factor_dtype: DTypeLike | None = None,
) -> tuple[ClippedTotal, PyTree]:
    """Computes the clipped sum in units of `grid`, with the passes of `ghost_clipped_sum`."""
    return ghost_clipped_sum(
        program,
        clip,
        points,
        examples,
        factor_dtype=factor_dtype,
        clip_and_sum=functools.partial(_clip_and_sum, grid),
    )


def _clip_and_sum(
    step: float,
    clip: Clip,
    points: GradientPoints,
    gradients: ScaledGradients,
    mask: jax.Array,
    whole: WholeBatch,
) -> ClippedTotal:
    """Returns the sum of clipped gradients in units of `step`."""
    del whole  # sums of integers have no rounding
    params, products = points.points[0], gradients.products
    if gradients.scales is None:
        return GradientSums({}, [], (), integers=True), None
    groups = clip.groups(params)
    pieces = make_pieces(gradients, groups)
    # Products of integers are summed exactly.
    pieces[: len(products)] = [Piece(x.size, x.group, _UNLIMITED) for x in pieces[: len(products)]]
    scaled, count = scaling(clip, points.reference), 1 + max(groups)
    coefficients, _, _ = bounds.clip_coefficients(
        scaled, gradients.scales, pieces, mask, group_count=count, tau=0.0
    )
    if any(factored.terms for factored in products):
        raise ValueError(
            "method='integers' needs parameters that are used as they are, not computed from "
            "others, such as standardized kernels. Use method='vmap'."
        )
    limits = make_grid(step, clip, sum(leaf.size for leaf in jax.tree.leaves(params)))
    methods = [product.method for product in gradients.plan.products]
    sizes = [piece.size for piece in pieces]
    (by_piece,) = unstack(coefficients)
    found = sum_integers(products, methods, gradients.formed, sizes, by_piece, limits)
    return place_sums(gradients, *found, integers=True), None


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


def sum_integers(
    products: list[FactoredGradients],
    methods: list[str],
    formed: list[jax.Array],
    sizes: list[NormBounds],
    coefficients: list[jax.Array],
    grid: IntegerGrid,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums of clipped gradients in int32, in units of the grid.

    Args:
      products: gradients given by factors.
      methods: the methods for their norms: "outer", "gram" or "form".
      formed: formed gradients, (B, …).
      sizes: the bounds of the norms, of products and then of formed gradients.
      coefficients: the coefficients in the same order, (B,) each. They do not affect privacy.
      grid: the unit of the sum, and the limit of a contribution.

    Returns:
      The sum of each product, (K, R, D), and of each formed gradient, (…).
    """
    _warn_of_rounding(products, grid)
    weights = [each * (1.0 / grid.step) for each in coefficients]
    scales = [
        [_row_scale(segment, weight) for segment in factored.segments]
        for factored, weight in zip(products, weights, strict=False)
    ]
    room = _room(products, scales, formed, sizes, weights, grid)
    factors = [
        [
            _round_segment(segment, scale, room * weight, factored.sizes)
            for segment, scale in zip(factored.segments, each, strict=True)
        ]
        for factored, each, weight in zip(products, scales, weights, strict=False)
    ]
    arrays = [
        _round(weigh_values(x, room * weight), _LARGEST_ENTRY, jnp.int32)
        for x, weight in zip(formed, weights[len(products) :], strict=True)
    ]
    # The norm and the sum must read the same integers.
    factors, arrays = materialize((factors, arrays), jnp.integer)
    terms: list[Term] = [
        (0, wide_integers.sum_of_squares(x.reshape(x.shape[0], -1)), None) for x in arrays
    ]
    for uses, factored, method in zip(factors, products, methods, strict=True):
        terms += square_norms(uses, factored.sizes, method)
    kept = certify(terms, grid.largest_square)
    sums = [
        functools.reduce(operator.add, [sum_kept(each, kept) for each in uses]) for uses in factors
    ]
    return sums, [jnp.sum(select(kept, x), axis=0, dtype=jnp.int32) for x in arrays]


def _warn_of_rounding(products: list[FactoredGradients], grid: IntegerGrid) -> None:
    """Warns if rounding may be as long as the contributions."""
    entries = sum(
        rows.shape[2] * math.prod(factored.sizes)
        for factored in products
        for rows, columns in factored.segments
        if not (is_one_hot(rows) or is_one_hot(columns))
    )
    if entries > grid.largest_square:
        warnings.warn(
            f"method='integers' may shorten gradients by half or drop them, because its rounding "
            f"may be as long as {math.sqrt(entries):.2g} grid steps, and a clipped gradient is "
            f"{math.sqrt(grid.largest_square):.2g}. Use smaller batches, a smaller "
            "`noise_multiplier`, or method='vmap'.",
            stacklevel=2,
        )


def _row_scale(segment: Segment, weight: jax.Array) -> jax.Array:
    """Returns powers of two that rows are multiplied by, (B,), from 1 to 2³⁰.

    For rows r with R entries and weighted columns w with D entries, the rounding errors of the
    product are in proportion to D ‖r‖² + R ‖w‖². The scale makes the two terms equal, if the
    largest row then has at most 8 bits. In a difference of points all rows are small.

    One-hot rows are not rounded. Their scale is the smallest for which columns have 15 bits.
    """
    if any(map(is_one_hot, segment)):
        columns = segment.rows if is_one_hot(segment.columns) else segment.columns
        top = binary_exponent((largest_entry(columns) * weight).astype(jnp.float32))
        return power_of_two(jnp.clip(top - _LOOKUP_BITS, 0, _ROW_BITS))
    rows, columns = segment
    ratio = rows.shape[-1] * _square(columns) * jnp.square(weight)
    ratio /= columns.shape[-1] * _square(rows)
    # Zero and NaN become the smallest scale.
    exponent = jnp.rint(0.25 * jnp.log2(jnp.where(ratio > 1.0, ratio, 1.0)))
    largest = jnp.minimum(_ROW_BITS - binary_exponent(largest_entry(rows)), _LARGEST_SCALE)
    return power_of_two(jnp.minimum(exponent, largest).astype(jnp.int32))


def _room(
    products: list[FactoredGradients],
    scales: list[list[jax.Array]],
    formed: list[jax.Array],
    sizes: list[NormBounds],
    weights: list[jax.Array],
    grid: IntegerGrid,
) -> jax.Array:
    """Returns factors of at most 1, (B,), that leave room for rounding below the limit.

    With independent errors, the expected squared norm grows by `spread`, and the norm has a
    standard deviation of at most the root of `aligned`.
    """
    square = spread = aligned = jnp.zeros_like(weights[0])
    for size, weight in zip(sizes, weights, strict=True):
        square += size.square * jnp.square(weight)
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
        word = mixed(word + place)
    up = (word >> 8).astype(jnp.float32) * 2.0**-24
    return jnp.clip(jnp.floor(x + up), -largest, largest).astype(dtype)


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
        found = _round(weigh_values(rows, scale), _LARGEST_ROW, jnp.int8)
    columns = _round(weigh_values(columns, weight / scale), _LARGEST_COLUMN, jnp.int16)
    return IntegerFactors(found, columns, scale.astype(jnp.int32), size, swapped)
