"""Measures gradients given by factors, sums them with coefficients, and bounds the rounding.

The coefficient of an example multiplies one of its factors. The sum is then one contraction over
examples and positions for each dense segment, and an integer sum for one-hot segments.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._gradients.clip import block_sums, integer_sums
from dpoptax._gradients.clip.bounds import NormBounds, broadcast_examples, largest_ratio
from dpoptax._gradients.ghost_clipping.norms import factor_products
from dpoptax._gradients.ghost_clipping.norms.factor_products import (
    FactoredGradients,
    Segment,
    is_one_hot,
)
from dpoptax._gradients.ghost_clipping.plan import Product
from dpoptax._gradients.ghost_clipping.trace.rules import Sizes
from dpoptax._support.tree import widen

# Relative errors of a coefficient times a factor, with room for the rounding of these bounds.
FLOAT32_ERROR = 2.0**-23
BFLOAT16_ERROR = 2.0**-8 * (1.0 + 2.0**-7)
# The largest part of the sum of a group.
_PART_ENTRIES = 2**19


def measure_product(product: Product, factored: FactoredGradients) -> NormBounds:
    """Returns upper bounds of ‖G‖² and S of a product's gradients."""
    if factored.terms:
        from dpoptax._gradients.ghost_clipping.transformed.pulled_back_norms import measure_terms

        return measure_terms(factored)
    if product.method == "form":
        return factor_products.measure_formed(factored.segments, factored.sizes)
    return factor_products.measure(factored.segments, factored.sizes, product.method)


def sum_error(factored: FactoredGradients) -> float:
    """Returns the error of one weighted summand, relative to S.

    A weighted factor is rounded once, and in bfloat16 a second time.
    """
    narrow = any(s.is_narrow and not any(map(is_one_hot, s)) for s in factored.segments)
    return BFLOAT16_ERROR if narrow else FLOAT32_ERROR


class SumParts(NamedTuple):
    """Splits a sum of gradients: dense segments separately, one-hot segments together.

    Attributes:
      dense: segments without one-hot factors.
      row_lookups: segments with one-hot rows.
      column_lookups: segments with one-hot columns, swapped.
      number: the number of parts, including fixed terms.
      ratio: M, such that f S ≤ M C.
      longest: the maximum number of products that an example adds to an entry of a dense segment.
      block: the number of examples in a block.
    """

    dense: list[Segment]
    row_lookups: list[Segment]
    column_lookups: list[Segment]
    number: int
    ratio: float
    longest: int
    block: int

    @property
    def has_lookups(self) -> bool:
        """Returns whether a segment is one-hot."""
        return bool(self.row_lookups or self.column_lookups)

    @property
    def largest_summand(self) -> float:
        """Returns an upper bound of an example's summand in a part, relative to C.

        It exceeds 1 if there are several parts, which may cancel.
        """
        return 1.0 if self.number == 1 else self.ratio


def split_sum(factored: FactoredGradients, examples: int) -> SumParts:
    """Splits the sum over `examples` into parts."""
    segments = factored.segments
    row_lookups = [s for s in segments if is_one_hot(s.rows)]
    column_lookups = [s.swapped for s in segments if is_one_hot(s.columns)]
    dense = [s for s in segments if not (is_one_hot(s.rows) or is_one_hot(s.columns))]
    number = len(dense) + bool(row_lookups) + bool(column_lookups) + len(factored.terms)
    ratio = absolute_ratio(factored)
    longest = max([1, *map(_terms_per_entry, dense)])
    block = block_sums.block_length(examples, longest, math.prod(factored.sizes), ratio)
    return SumParts(dense, row_lookups, column_lookups, number, ratio, longest, block)


def absolute_ratio(factored: FactoredGradients) -> float:
    """Returns M, such that the parts of a clipped gradient are together at most M C."""
    positions = sum(segment.rows.shape[2] for segment in factored.segments)
    return largest_ratio(positions + len(factored.terms))


def sum_products(
    factored: FactoredGradients,
    coefficients: jax.Array,
    *,
    bound: float,
    examples: int,
) -> jax.Array:
    """Returns Σ_i coefficients[i] G_i, (K, R, D), for coefficients (B,).

    The result is in float32 at least. The norm of a summand must be at most `bound`, and its parts
    together at most M times `bound`. `product_rounding` bounds how one of the `examples` of the
    whole batch changes the rounding.
    """
    cut = split_sum(factored, examples)
    found = [_sum_segment(segment, coefficients, cut.block) for segment in cut.dense]
    for term in factored.terms:
        total = block_sums.sum_weighted(coefficients, term.weights, block=cut.block)
        found.append(term.basis * total)
    table = functools.reduce(operator.add, found or [jnp.zeros(factored.sizes, jnp.float32)])
    if not cut.has_lookups:
        return table
    add = functools.partial(
        _add_one_hot, cut, coefficients=coefficients, examples=examples, bound=bound
    )
    if cut.row_lookups:
        table = add(table, cut.row_lookups)
    if cut.column_lookups:
        table = add(table.swapaxes(-1, -2), cut.column_lookups).swapaxes(-1, -2)
    return table


def product_rounding(factored: FactoredGradients, examples: int) -> block_sums.Rounding:
    """Bounds how one example changes the rounding of `sum_products`."""
    cut = split_sum(factored, examples)
    found = _lookup_roundings(cut, factored.sizes, examples) if cut.has_lookups else []
    rounding = block_sums.Rounding()
    if cut.dense or factored.terms:
        rounding = block_sums.block_rounding(
            examples,
            cut.block,
            terms=cut.longest,
            ratio=cut.ratio,
            largest_summand=cut.largest_summand,
        )
    # All parts of an example are together at most M C, so the largest part counts. Fixed terms add
    # one rounding, for the product of their sums with the fixed arrays.
    joined = cut.ratio * block_sums.parts_rounding(cut.number + bool(factored.terms), examples)
    joined += max(each.joined for each in [rounding, *found])
    own = sum(each.own for each in found)
    termwise = cut.number > 1 or any(each.termwise for each in found)
    return dataclasses.replace(rounding, joined=joined, own=own, termwise=termwise)


def _lookup_roundings(cut: SumParts, sizes: Sizes, examples: int) -> list[block_sums.Rounding]:
    """Bounds how one example changes the rounding of the integer sums of lookups."""
    groups, rows, columns = sizes
    return [
        integer_sums.lookup_rounding(
            groups * size,
            terms=sum(map(_terms_per_entry, lookups)),
            examples=examples,
            ratio=cut.ratio,
            largest_summand=cut.largest_summand,
        )
        for lookups, size in ((cut.row_lookups, columns), (cut.column_lookups, rows))
        if lookups
    ]


def weigh_values(value: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Multiplies values (B, …) by the coefficients of their examples, (B,)."""
    return widen(value) * broadcast_examples(coefficients, value)


def _add_one_hot(
    cut: SumParts,
    table: jax.Array,
    segments: list[Segment],
    *,
    coefficients: jax.Array,
    examples: int,
    bound: float,
) -> jax.Array:
    """Adds the sum of segments whose rows are one-hot to a table (K, R, D)."""

    def add(table: jax.Array, lookups: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        return integer_sums.add_lookups(
            table,
            lookups,
            terms=sum(map(_terms_per_entry, segments)),
            examples=examples,
            bound=bound,
            ratio=cut.ratio,
            largest_summand=cut.largest_summand,
        )

    lookups = [
        (merge_examples(rows)[0], merge_examples(weigh_values(columns, coefficients))[0])
        for rows, columns in segments
    ]
    return jax.vmap(add)(table, lookups)


def _sum_segment(segment: Segment, coefficients: jax.Array, block: int) -> jax.Array:
    rows, columns = segment
    if math.prod(rows.shape) < math.prod(columns.shape):  # the smaller factor is copied
        weighted = Segment(weigh_values(rows, coefficients), columns)
    else:
        weighted = Segment(rows, weigh_values(columns, coefficients))
    # In bfloat16 the weighted factor is rounded, which `sum_error` includes.
    weighted = weighted.rounded(None)
    sizes = rows.shape[1], rows.shape[-1], columns.shape[-1]

    def block_sum(rows: jax.Array, columns: jax.Array) -> jax.Array:
        return factor_products.contract("bktr,bktd->krd", rows, columns)

    def sum_group(segments: list[Segment]) -> jax.Array:
        (rows, columns), length = segments[0], sizes[1] // _row_parts(sizes)

        def sum_part(start: jax.Array) -> jax.Array:
            part = lax.dynamic_slice_in_dim(rows, start, length, axis=3)
            return block_sums.sum_in_blocks(block_sum, part, columns, block=block)

        return lax.map(sum_part, jnp.arange(0, sizes[1], length)).reshape(sizes[1:])

    def sum_together() -> jax.Array:
        return block_sums.sum_in_blocks(block_sum, *weighted, block=block)

    if not factor_products.has_large_groups(sizes):
        return sum_together()
    found: jax.Array = lax.platform_dependent(
        tpu=lambda: factor_products.map_groups(sum_group, [weighted]), default=sum_together
    )
    return found


def _row_parts(sizes: Sizes) -> int:
    """Returns the number of parts that the rows of a group are summed in.

    A TPU's sum that fits into vector memory is compiled as one unrolled kernel. A quarter of it
    compiles in a quarter of the time. Parts are aligned with tiles of 128 entries.
    """
    _, rows, columns = sizes
    lengths = [n for n in range(128, rows, 128) if rows % n == 0 and n * columns <= _PART_ENTRIES]
    return rows // max(lengths, default=rows)


def _terms_per_entry(segment: Segment) -> int:
    """Returns how many products an example adds to an entry."""
    return max(1, segment.rows.shape[2])


def merge_examples(factor: jax.Array) -> jax.Array:
    """Reshapes a factor (B, K, L, ...) to (1, K, B L, ...)."""
    examples, groups, positions = factor.shape[:3]
    # Without groups the reshape is free; otherwise it copies the factor.
    moved = factor if groups == 1 else factor.swapaxes(0, 1)
    return moved.reshape(1, groups, examples * positions, *factor.shape[3:])
