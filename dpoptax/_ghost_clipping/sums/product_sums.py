"""Measures the gradients of products, sums them with coefficients, and bounds the rounding.

The coefficient of an example multiplies one of its factors. The sum of a segment is then one
contraction over examples and positions. Most products have one dense segment. Those of shared
parameters and of several gradient points have several, and lookup tables have one-hot factors.
Segments with one-hot factors are added together as integers.
"""

import collections
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax import _rounding
from dpoptax._ghost_clipping import factor_products
from dpoptax._ghost_clipping.factor_products import FactoredGradients, Segment
from dpoptax._ghost_clipping.plan import Product, weighs_rows
from dpoptax._rounding import block_sums
from dpoptax._rounding.bounds import (
    FLOAT32_ERROR,
    LARGEST_NUMBER,
    MINIMUM_BOUND,
    NormBounds,
    Piece,
    broadcast_examples,
    largest_ratio,
)
from dpoptax._support.tree import widen

# As `FLOAT32_ERROR`, for a factor in bfloat16.
BFLOAT16_ERROR = 2.0**-8 * (1.0 + 2.0**-7)


def measure_product(factored: FactoredGradients, method: str) -> NormBounds:
    """Returns upper bounds of ‖G‖² and S of a product's gradients."""
    if factored.fixed_terms:
        from dpoptax._ghost_clipping.transformed.pulled_back_norms import measure_terms

        return measure_terms(factored)
    if method == "form":
        return factor_products.measure_formed(factored.segments, factored.sizes)
    return factor_products.measure(factored.segments, factored.sizes, method)


def sum_error(factored: FactoredGradients) -> float:
    """Returns the error of one weighted summand, relative to S.

    A weighted factor is rounded once, and in bfloat16 a second time.
    """
    narrow = any(s.is_narrow and not s.is_lookup for s in factored.segments)
    return BFLOAT16_ERROR if narrow else FLOAT32_ERROR


def flushed(factored: FactoredGradients) -> float:
    """Bounds the numbers of an example's summand that are set to zero, relative to C.

    In each term, they are less than 2^-126 next to a factor below 2⁴⁰. As much is added for numbers
    of sums.
    """
    entry = 2.0 * 2.0**-126 * LARGEST_NUMBER / MINIMUM_BOUND
    return factored.terms * math.sqrt(math.prod(factored.sizes)) * entry


def absolute_ratio(factored: FactoredGradients) -> float:
    """Returns M, such that the parts of a clipped gradient are together at most M C."""
    only_lookups = all(segment.is_lookup for segment in factored.segments)
    if only_lookups and not factored.fixed_terms:  # added without rounding
        return max(largest_ratio(factored.terms), 2.0 * math.sqrt(factored.terms))
    return largest_ratio(factored.terms)


def is_plain(factored: FactoredGradients) -> bool:
    """Returns whether gradients have one segment that is not stacked, and no fixed terms."""
    single = len(factored.segments) == 1 and not factored.fixed_terms
    return single and factored.segments[0].rows.shape[1] == 1


def products_per_entry(segment: Segment) -> int:
    """Returns how many products an example adds to an entry."""
    return max(1, segment.rows.shape[2])


def weigh_values(value: jax.Array, coefficients: jax.Array) -> jax.Array:
    """Multiplies values (B, …) by the coefficients of their examples, (B,).

    Values with a coefficient of zero become zero, also if they are not finite.
    """
    weights = broadcast_examples(coefficients, value)
    return jnp.where(weights != 0, widen(value) * weights, 0.0)


def sum_segment(
    segment: Segment, coefficients: jax.Array, block: int, largest_summand: float = 1.0
) -> jax.Array:
    """Returns the weighted sum of the gradients of a dense segment, (K, R, D), in blocks.

    The other factor must be finite (`PlannedUse.weighs_operand`).
    """
    rows, columns = segment
    # Rows are (B, K, L, R), and columns (B, K, L, D). The weighted factor is copied.
    if weighs_rows(rows.shape[-1], columns.shape[-1]):
        rows = weigh_values(rows, coefficients)
    else:
        columns = weigh_values(columns, coefficients)
    # In bfloat16 the weighted factor is rounded, which `sum_error` includes.
    weighted = Segment(rows, columns).rounded(None)
    sizes = rows.shape[1], rows.shape[-1], columns.shape[-1]
    in_blocks = functools.partial(
        block_sums.sum_in_blocks, block=block, largest_summand=largest_summand
    )
    if sizes[0] == 1:
        # With an axis of one matrix, XLA on CPU and GPU copies or transposes whole factors.
        return in_blocks(_sum_matrix, *(x[:, 0] for x in weighted))[None]
    # Both factors keep their order of axes.
    together = functools.partial(in_blocks, _sum_stacks, *weighted)
    if not factor_products.has_large_stacks(sizes):
        return together()
    by_matrix = functools.partial(_sum_by_matrix, weighted, in_blocks)
    found: jax.Array = lax.platform_dependent(tpu=by_matrix, default=together)
    return found


_sum_stacks = functools.partial(factor_products.contract, "bktr,bktd->krd")


def _sum_matrix(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums over examples and positions at once, from (B, L, …) to (R, D)."""
    separate = functools.partial(factor_products.contract, "btr,btd->rd")
    # On TPU, merged axes would be copied. On CPU, XLA transposes a factor with separate axes. This
    # is faster only if its rows are multiples of 8 KB, whose columns collide in caches.
    cpu = separate if columns.shape[-1] % 2048 == 0 else _sum_merged
    default = _sum_merged if rows.shape[1] == 1 else separate
    if cpu is default:
        return cpu(rows, columns)
    found: jax.Array = lax.platform_dependent(rows, columns, cpu=cpu, default=default)
    return found


def _sum_merged(rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Sums over all axes but the last, from (B, …, R) and (B, …, D) to (R, D)."""
    merged = (x.reshape(-1, x.shape[-1]) for x in (rows, columns))
    return factor_products.contract("nr,nd->rd", *merged)


def _sum_by_matrix(weighted: Segment, in_blocks: Callable[..., jax.Array]) -> jax.Array:
    """Returns the sum of a weighted segment, one large matrix after the other.

    On TPU, a product of all stacks takes longer to compile, and its operands are copied.
    """
    found: jax.Array = factor_products.map_stacks(
        lambda segments: in_blocks(_sum_stacks, *segments[0])[0], [weighted]
    )
    return found


def merge_examples(factor: jax.Array) -> jax.Array:
    """Reshapes a factor (B, K, L, ...) to (1, K, B L, ...)."""
    examples, stacks, positions = factor.shape[:3]
    # Without stacks the reshape is free; otherwise it copies the factor.
    moved = factor if stacks == 1 else factor.swapaxes(0, 1)
    return moved.reshape(1, stacks, examples * positions, *factor.shape[3:])


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
    # Lookups are added together, so they count as one part.
    number = len(dense) + bool(lookups) + len(factored.fixed_terms)
    ratio = absolute_ratio(factored)
    longest = max([1, *map(products_per_entry, dense)])
    block = block_sums.block_length(examples, longest, math.prod(factored.sizes), ratio)
    return SumParts(dense, lookups, number, ratio, longest, block)


def _lookup_options(cut: SumParts) -> dict[str, Any]:
    """Returns the arguments that the sum of lookups shares with the bound of its rounding."""
    products = sum(map(products_per_entry, cut.lookups))
    return {"products": products, "ratio": cut.ratio, "largest_summand": cut.largest_summand}


def sum_products(
    factored: FactoredGradients, coefficients: jax.Array, *, bound: float, examples: int
) -> jax.Array:
    """Returns Σ_i coefficients[i] G_i, (K, R, D), for coefficients (B,).

    The result is in float32 at least. The norm of a summand must be at most `bound`, and its parts
    together at most M times `bound`. `product_rounding` bounds how one of the `examples` of the
    whole batch changes the rounding.
    """
    cut = split_sum(factored, examples)
    found = [sum_segment(s, coefficients, cut.block, cut.largest_summand) for s in cut.dense]
    for term in factored.fixed_terms:
        # The basis is the same for all examples, so it multiplies the sum of their weights once.
        total = block_sums.sum_weighted(
            coefficients, term.weights, block=cut.block, largest_summand=cut.largest_summand
        )
        found.append(term.basis * total)
    table = functools.reduce(operator.add, found or [jnp.zeros(factored.sizes, jnp.float32)])
    if not cut.lookups:
        return table
    # For each table, row numbers (K, B L) and weighted columns (K, B L, D).
    lookups = [
        (merge_examples(rows)[0], merge_examples(weigh_values(columns, coefficients))[0])
        for rows, columns in cut.lookups
    ]

    def add(table: jax.Array, lookups: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        options = _lookup_options(cut)
        return _rounding.integer_sums.add_lookups(
            table, lookups, examples=examples, bound=bound, **options
        )

    return jax.vmap(add)(table, lookups)


def product_rounding(factored: FactoredGradients, examples: int) -> block_sums.Rounding:
    """Bounds how one example changes the rounding of `sum_products`."""
    cut = split_sum(factored, examples)
    rounding = lookups = block_sums.Rounding()
    if cut.lookups:
        stacks, _, columns = factored.sizes
        lookups = _rounding.integer_sums.lookup_rounding(
            stacks * columns, examples=examples, **_lookup_options(cut)
        )
    if cut.dense or factored.fixed_terms:
        summand = cut.largest_summand
        rounding = block_sums.block_rounding(
            examples, cut.block, products=cut.longest, ratio=cut.ratio, largest_summand=summand
        )
    # All parts of an example are together at most M C, so the largest part counts. Fixed terms add
    # one rounding, for the product of their sums with the fixed arrays.
    parts = block_sums.parts_rounding(cut.number + bool(factored.fixed_terms), examples)
    joined = cut.ratio * parts + max(rounding.joined, lookups.joined)
    own, termwise = lookups.own + flushed(factored), cut.number > 1 or lookups.termwise
    return dataclasses.replace(rounding, joined=joined, own=own, termwise=termwise)


def product_pieces(
    products: list[FactoredGradients], planned: Sequence[Product], groups: list[int]
) -> list[Piece]:
    """Returns the pieces of the norm that are products."""
    sizes = measure_products(products, [product.method for product in planned])
    return [
        Piece(size, groups[product.leaf], absolute_ratio(factored), sum_error(factored))
        for product, factored, size in zip(planned, products, sizes, strict=True)
    ]


def measure_products(products: list[FactoredGradients], methods: list[str]) -> list[NormBounds]:
    """Returns the norm bounds of products; inner products of equal lengths are added together."""
    measure = _once_per_shape(measure_product, static_argnums=1)
    add = _once_per_shape(lambda x: factor_products.inner_product_sums(x.segments, x.sizes))
    found: dict[int, NormBounds] = {}
    by_positions: dict[int, list[int]] = collections.defaultdict(list)
    for i, (factored, method) in enumerate(zip(products, methods, strict=True)):
        if method == "gram" and is_plain(factored):
            by_positions[factored.segments[0].rows.shape[2]].append(i)
        else:
            found[i] = measure(factored, method)
    for indices in by_positions.values():
        # Each has arrays (B, L) with the same L, which are stacked and summed over L by one kernel.
        sums = [add(products[i]) for i in indices]
        given = [(products[i].segments, products[i].sizes) for i in indices]
        together = factor_products.measure_together(sums, given)
        found |= dict(zip(indices, together, strict=True))
    return [found[i] for i in range(len(products))]


def _once_per_shape(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a function of factored gradients that is traced once for those of equal shapes.

    The traces are kept for this call only.
    """
    # A new function object, because `jit` shares traces among calls with the same function.
    return jax.jit(functools.partial(function), **options)


def sum_each(
    products: list[FactoredGradients], coefficients: list[jax.Array], bound: float, examples: int
) -> Iterator[jax.Array]:
    """Yields the sum of each product, `sum_products`. Further coefficients are ignored."""
    part = functools.partial(sum_products, bound=bound, examples=examples)
    return map(_once_per_shape(part), products, coefficients)
