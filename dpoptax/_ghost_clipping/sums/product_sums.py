"""Sums the gradients of products with coefficients, and bounds the rounding.

Most products have one dense segment. Those of shared parameters and of several gradient points have
several, and lookup tables have one-hot factors. Each dense segment is one contraction over examples
and positions. Segments with one-hot factors are added together as integers.
"""

import dataclasses
import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.norms.factor_products import (
    FactoredGradients,
    Segment,
    is_one_hot,
)
from dpoptax._ghost_clipping.sums.weighted_products import (
    absolute_ratio,
    block_size,
    flushed,
    merge_examples,
    sum_segment,
    terms_per_entry,
    weigh_values,
)
from dpoptax._losses.rules import Sizes
from dpoptax._rounding import block_sums, integer_sums


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
    longest = max([1, *map(terms_per_entry, dense)])
    block = block_size(factored, examples, longest)
    return SumParts(dense, row_lookups, column_lookups, number, ratio, longest, block)


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
    summand = cut.largest_summand
    found = [sum_segment(segment, coefficients, cut.block, summand) for segment in cut.dense]
    for term in factored.terms:
        total = block_sums.sum_weighted(
            coefficients, term.weights, block=cut.block, largest_summand=summand
        )
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
    own = sum(each.own for each in found) + flushed(factored)
    termwise = cut.number > 1 or any(each.termwise for each in found)
    return dataclasses.replace(rounding, joined=joined, own=own, termwise=termwise)


def _lookup_roundings(cut: SumParts, sizes: Sizes, examples: int) -> list[block_sums.Rounding]:
    """Bounds how one example changes the rounding of the integer sums of lookups."""
    groups, rows, columns = sizes
    return [
        integer_sums.lookup_rounding(
            groups * size,
            terms=sum(map(terms_per_entry, lookups)),
            examples=examples,
            ratio=cut.ratio,
            largest_summand=cut.largest_summand,
        )
        for lookups, size in ((cut.row_lookups, columns), (cut.column_lookups, rows))
        if lookups
    ]


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
            terms=sum(map(terms_per_entry, segments)),
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
