"""Weighted sums of gradients held as products, and what one example changes in their rounding.

What each example's factors are weighted with goes into one of them, and the sum is one contraction
over examples and positions. A sum is taken in parts: each dense segment, and one-hot ones.
"""

import dataclasses
import functools
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dpoptax._clip import block_sums
from dpoptax._clip.bounds import by_example, largest_ratio
from dpoptax._ghost_clipping.norms import factor_products
from dpoptax._ghost_clipping.norms.factor_products import Segment, indexed
from dpoptax._ghost_clipping.norms.pulled_back_norms import Factored
from dpoptax._tree import widen


def sum_error(segments: list[Segment]) -> float:
    """How far one example's summand is from its coefficient times G, relative to S, before sums."""
    return 2.0**-16 if any(map(_narrow, segments)) else 2.0**-23


def _narrow(segment: Segment) -> bool:
    return any(x.dtype == jnp.bfloat16 for x in segment)


class Parts(NamedTuple):
    """What a sum of gradients is added up of: each dense segment alone, one-hot ones together.

    Attributes:
      dense: segments without one-hot factors.
      of_rows: those whose rows are one-hot.
      of_columns: those whose columns are, swapped.
      number: of parts, with the terms that stand beside the segments.
      ratio: M: f S ≤ M C.
      longest: the products that an example adds to an entry of a dense segment, at most.
      block: how many examples are summed in one piece.
    """

    dense: list[Segment]
    of_rows: list[Segment]
    of_columns: list[Segment]
    number: int
    ratio: float
    longest: int
    block: int

    @property
    def whole(self) -> float:
        """What an example's summand in a part is at most, relative to C. Parts may cancel."""
        return 1.0 if self.number == 1 else self.ratio


def parts(factored: Factored, sizes: tuple[int, int, int], examples: int) -> Parts:
    """The parts of a sum over so many examples."""
    segments = factored.segments
    of_rows = [s for s in segments if indexed(s.rows)]
    of_columns = [s.swapped for s in segments if indexed(s.columns)]
    dense = [s for s in segments if not (indexed(s.rows) or indexed(s.columns))]
    number = len(dense) + bool(of_rows) + bool(of_columns) + len(factored.terms)
    ratio = ratio_of(factored)
    longest = max([1, *map(_terms, dense)])
    block = block_sums.block_length(examples, longest, math.prod(sizes), ratio)
    return Parts(dense, of_rows, of_columns, number, ratio, longest, block)


def ratio_of(factored: Factored) -> float:
    """M: what a clipped gradient is the sum of is at most so many times its bound."""
    positions = sum(segment.rows.shape[2] for segment in factored.segments)
    return largest_ratio(positions + len(factored.terms))


def weighted_sum(
    factored: Factored,
    weights: jax.Array,
    sizes: tuple[int, int, int],
    *,
    bound: float,
    examples: int,
) -> jax.Array:
    """Σ_i weights[i] G_i, (K, R, C) in float32 at least, for weights (B,).

    No weights[i] G_i has a norm above `bound`, and what they are the sum of is none above M times
    it. What one of the `examples`, of which these are a part, changes in the rounding: `rounding`.
    """
    cut = parts(factored, sizes, examples)
    found = [_weighted(segment, weights, cut.block) for segment in cut.dense]
    if cut.of_rows:
        found.append(_looked_up(cut, cut.of_rows, weights, sizes[1], examples, bound))
    if cut.of_columns:
        table = _looked_up(cut, cut.of_columns, weights, sizes[2], examples, bound)
        found.append(table.swapaxes(-1, -2))
    for term in factored.terms:
        found.append(term.basis * block_sums.weighted(weights, term.weights, block=cut.block))
    return functools.reduce(operator.add, found)


def rounding(factored: Factored, sizes: tuple[int, int, int], examples: int) -> block_sums.Rounding:
    """What one example changes in the rounding of `weighted_sum`."""
    cut = parts(factored, sizes, examples)
    found = [
        block_sums.rounding_of_lookups(
            sizes[0] * columns,
            terms=sum(map(_terms, lookups)),
            examples=examples,
            ratio=cut.ratio,
            whole=cut.whole,
        )
        for lookups, columns in ((cut.of_rows, sizes[2]), (cut.of_columns, sizes[1]))
        if lookups
    ]
    rounding = block_sums.Rounding()
    if cut.dense or factored.terms:
        rounding = block_sums.rounding_in_blocks(
            examples, cut.block, terms=cut.longest, ratio=cut.ratio, whole=cut.whole
        )
    # Of the parts, what an example adds is M C together, so that the largest counts. Terms are one
    # more, for the product of their sums with the fixed arrays.
    joined = cut.ratio * block_sums.of_parts(cut.number + bool(factored.terms), examples)
    joined += max(each.joined for each in [rounding, *found])
    own = sum(each.own for each in found)
    by_terms = cut.number > 1 or any(each.by_terms for each in found)
    return dataclasses.replace(rounding, joined=joined, own=own, by_terms=by_terms)


def _times(value: jax.Array, weight: jax.Array) -> jax.Array:
    """Values (B, …) times the weight of their example, (B,)."""
    return widen(value) * by_example(weight, value)


def _looked_up(
    cut: Parts,
    segments: list[Segment],
    weights: jax.Array,
    size: int,
    examples: int,
    bound: float,
) -> jax.Array:
    """Those whose rows are one-hot."""

    def add(lookups: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        return block_sums.of_lookups(
            lookups,
            size,
            terms=sum(map(_terms, segments)),
            examples=examples,
            bound=bound,
            ratio=cut.ratio,
            whole=cut.whole,
        )

    lookups = [
        (_together(rows)[0], _together(_times(columns, weights))[0]) for rows, columns in segments
    ]
    return jax.vmap(add)(lookups)


def _weighted(segment: Segment, weights: jax.Array, block: int) -> jax.Array:
    rows, columns = segment
    if math.prod(rows.shape) < math.prod(columns.shape):  # the smaller of the two is copied
        rows = _times(rows, weights)
    else:
        columns = _times(columns, weights)

    def outer_sums(rows: jax.Array, columns: jax.Array) -> jax.Array:
        return _outer_sums(_together(rows)[0], _together(columns)[0])

    return block_sums.in_blocks(outer_sums, rows, columns, block=block)


def _terms(segment: Segment) -> int:
    """The products that an example adds to an entry: in bfloat16 there are two at a position."""
    return max(1, segment.rows.shape[2]) * (2 if _narrow(segment) else 1)


def _together(factor: jax.Array) -> jax.Array:
    """(B, K, T, ...) to (1, K, B T, ...)."""
    batch, groups, positions = factor.shape[:3]
    moved = factor if groups == 1 else factor.swapaxes(0, 1)
    return moved.reshape(1, groups, batch * positions, *factor.shape[3:])


def _outer_sums(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """rowsᵀ columns, (K, R, C), in the narrower dtype of the two; the other holds coefficients.

    In bfloat16 the coefficients would round, and push a contribution past the clip bound: what
    holds them goes in two parts, which keep 16 bits of the mantissa.
    """

    def dot(rows: jax.Array, columns: jax.Array) -> jax.Array:
        if rows.shape[0] == 1:
            return factor_products.contract("tr,tc->rc", rows[0], columns[0])[None]
        return factor_products.contract("ktr,ktc->krc", rows, columns)

    def parts(factor: jax.Array) -> list[jax.Array]:
        if factor.dtype == narrow:
            return [factor]
        high = factor_products.rounded(factor, narrow)
        return [high, factor_products.rounded(factor - high.astype(factor.dtype), narrow)]

    narrow = min(rows.dtype, columns.dtype, key=lambda d: d.itemsize)
    if narrow.itemsize >= 4:
        return dot(rows, columns)
    found = [dot(r, c) for r in parts(rows) for c in parts(columns)]
    return functools.reduce(operator.add, found)
