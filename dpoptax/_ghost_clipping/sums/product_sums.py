"""Sums the gradients of products with coefficients, and bounds the rounding.

Most products have one dense segment. Those of shared parameters and of several gradient points have
several, and lookup tables have one-hot factors. Each dense segment is one contraction over examples
and positions. Segments with one-hot factors are added together as integers.
"""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dpoptax._ghost_clipping.norms.factor_products import FactoredGradients, Segment
from dpoptax._ghost_clipping.sums.weighted_products import (
    absolute_ratio,
    flushed,
    merge_examples,
    sum_segment,
    terms_per_entry,
    weigh_values,
)
from dpoptax._rounding import block_sums, integer_sums


class SumParts(NamedTuple):
    """Splits a sum of gradients: dense segments separately, lookups together.

    Attributes:
      dense: segments without one-hot rows.
      lookups: the other segments.
      number: the number of parts, including fixed terms.
      ratio: M, such that f S ≤ M C.
      longest: the maximum number of products that an example adds to an entry of a dense segment.
      block: the number of examples in a block.
    """

    dense: list[Segment]
    lookups: list[Segment]
    number: int
    ratio: float
    longest: int
    block: int

    @property
    def largest_summand(self) -> float:
        """Returns an upper bound of an example's summand in a part, relative to C.

        It exceeds 1 if there are several parts, which may cancel.
        """
        return 1.0 if self.number == 1 else self.ratio


def split_sum(factored: FactoredGradients, examples: int) -> SumParts:
    """Splits the sum over `examples` into parts."""
    lookups = [s for s in factored.segments if s.is_lookup]
    dense = [s for s in factored.segments if not s.is_lookup]
    number = len(dense) + bool(lookups) + len(factored.terms)
    ratio = absolute_ratio(factored)
    longest = max([1, *map(terms_per_entry, dense)])
    block = block_sums.block_length(examples, longest, math.prod(factored.sizes), ratio)
    return SumParts(dense, lookups, number, ratio, longest, block)


def _lookup_terms(cut: SumParts) -> dict[str, Any]:
    """Returns the arguments that the sum of lookups shares with the bound of its rounding."""
    terms = sum(map(terms_per_entry, cut.lookups))
    return {"terms": terms, "ratio": cut.ratio, "largest_summand": cut.largest_summand}


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
    if not cut.lookups:
        return table
    lookups = [
        (merge_examples(rows)[0], merge_examples(weigh_values(columns, coefficients))[0])
        for rows, columns in cut.lookups
    ]

    def add(table: jax.Array, lookups: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        terms = _lookup_terms(cut)
        return integer_sums.add_lookups(table, lookups, examples=examples, bound=bound, **terms)

    return jax.vmap(add)(table, lookups)


def product_rounding(factored: FactoredGradients, examples: int) -> block_sums.Rounding:
    """Bounds how one example changes the rounding of `sum_products`."""
    cut = split_sum(factored, examples)
    rounding = lookups = block_sums.Rounding()
    if cut.lookups:
        groups, _, columns = factored.sizes
        lookups = integer_sums.lookup_rounding(
            groups * columns, examples=examples, **_lookup_terms(cut)
        )
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
    joined += max(rounding.joined, lookups.joined)
    termwise = cut.number > 1 or lookups.termwise
    own = lookups.own + flushed(factored)
    return dataclasses.replace(rounding, joined=joined, own=own, termwise=termwise)
