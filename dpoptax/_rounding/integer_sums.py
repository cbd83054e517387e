"""Sums integers, which are exact in any order.

Floats become integer multiples of a step. The totals of lookups and of many devices are summed this
way if one example could change the rounding of a float sum too much (`block_sums`), and all clipped
gradients if `clipped_grad` is given a grid.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from dpoptax._clips.clip import Clip
from dpoptax._rounding.block_sums import ROUNDING_LIMIT, TWO_ROUNDINGS, Rounding, block_rounding
from dpoptax._rounding.bounds import UNIT_ROUNDOFF
from dpoptax._support.marks import ANY_ORDER
from dpoptax._support.tree import float32_at_least

# The sum and its noise, at most 17 standard deviations of 2²² steps, stay within int32.
LARGEST_GRID_SUM = 2**30


@dataclasses.dataclass(frozen=True)
class IntegerSteps:
    """Represents numbers as integers, whose sums are exact in any order.

    A number is rounded to multiples of a step g = 2^-exponent. The remainder is rounded to
    multiples of the fine step 2^-finer g. Partial sums of whole steps may overflow, because
    integers wrap around and the total is in range. Sums of fine steps do not overflow.

    Attributes:
      exponent: chosen so that totals and summands are at most 2³⁰ steps (2⁶² in float64).
      finer: 30 − ⌈log₂ N⌉ for N numbers that are added to an entry.
    """

    exponent: int
    finer: int

    def split(self, values: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns whole and fine steps of values in float32 or float64."""
        kind = jnp.int64 if values.dtype == jnp.float64 else jnp.int32
        scaled = values * 2.0**self.exponent
        whole = jnp.round(scaled)
        # XLA may fuse the products into the difference, which then includes their rounding: for
        # large numbers, more than fits into fine steps. The limits change nothing otherwise.
        rest = jnp.clip(scaled - whole, -0.5, 0.5)
        return whole.astype(kind), jnp.round(rest * 2.0**self.finer).astype(kind)

    def join(self, whole: jax.Array, fine: jax.Array) -> jax.Array:
        """Returns the sums of whole and fine steps as numbers, rounded once."""
        kind = jnp.float64 if whole.dtype == jnp.int64 else jnp.float32
        # Carry whole steps out of the fine ones; the shift rounds down, so the rest is positive.
        whole, fine = whole + (fine >> self.finer), fine & (2**self.finer - 1)
        high = (whole >> 12) << 12  # a float holds both parts exactly
        low = (whole - high).astype(kind) + fine.astype(kind) * 2.0**-self.finer
        return (high.astype(kind) + low) * 2.0**-self.exponent


def make_steps(largest: float, count: int, *, bits: int = 30) -> IntegerSteps:
    """Returns steps for sums of `count` numbers per entry.

    Each number and each total is at most `largest`.

    Raises:
      ValueError: the step is outside the range of float32.
    """
    # The largest total must fit into 2^bits whole steps.
    exponent = bits - math.ceil(math.log2(largest))
    if abs(exponent) > 126:
        raise ValueError(
            f"The largest sum must be between 1e-29 and 1e47, got {largest:g}. Scale the loss and "
            "the clipping bound by the same factor."
        )
    return IntegerSteps(exponent, _fine_bits(count, bits))


def _fine_bits(count: int, bits: int = 30) -> int:
    """Returns the bits of fine steps, so that sums of `count` remainders fit."""
    return max(0, bits - math.ceil(math.log2(count or 1)))


def step_rounding(count: int, rows: int, columns: int, largest: float, examples: float) -> Rounding:
    """Bounds how one example changes the rounding of a sum by `make_steps`.

    The change is at most half a fine step for each number that the example adds, plus the rounding
    of the conversion back to floats. The latter rounds the fine steps below a whole one, the 2¹²
    whole steps below the high part, and the total. Steps are relative to C, but τ is relative to
    C/(1 + τ), with τ ≤ 1/2: hence the factor 1.5.

    Args:
      count: how many numbers all examples together add to an entry.
      rows: L, how many numbers an example adds, possibly all to one entry.
      columns: the entries of a row.
      largest: as for `make_steps`.
      examples: an upper bound of the sum, relative to C.
    """
    # A step is at most twice as long as necessary, since its length is a power of two.
    step = 2.0**-29 * largest
    fine = step * 2.0 ** -_fine_bits(count)
    added = 0.5 * fine * rows * math.sqrt(columns)
    low = TWO_ROUNDINGS * 2**12 * step * math.sqrt(rows * columns)
    return Rounding(joined=TWO_ROUNDINGS * examples, own=1.5 * (added + low))


def add_lookups(
    table: jax.Array,
    lookups: Sequence[tuple[jax.Array, jax.Array]],
    *,
    products: int,
    examples: int,
    bound: float,
    ratio: float,
    largest_summand: float,
) -> jax.Array:
    """Adds the sums of the values of all lookups to the rows of a table (size, D).

    A scatter sums one value after the other. If one example could change its rounding too much,
    values are summed as `IntegerSteps` instead. `lookup_rounding` bounds the change.

    Args:
      table: the table, which each sum is added to with one rounding.
      lookups: rows (N,), integers below `size`, and values (N, D), at most `ratio` · `bound`.
      products: L, the lookups of one example.
      examples: B, the number of examples in all micro-batches and devices.
      bound: C.
      ratio: M, such that f S ≤ M C.
      largest_summand: an upper bound of the amount that all lookups of one example add to an entry,
        relative to C.

    Raises:
      ValueError: the step for `bound` is outside the range of float32.
    """
    wide, size = float32_at_least(table, *(values for _, values in lookups)), len(table)
    table, count = table.astype(wide), products * examples
    if _scatter_rounding(products, examples, ratio) is not None:
        sums = jnp.zeros_like(table)
        with jax.named_scope(ANY_ORDER):
            for rows, values in lookups:
                sums = sums.at[rows].add(values.astype(wide))
        return table + sums
    bits = 62 if wide == jnp.float64 else 30
    exact = make_steps(max(examples * largest_summand, ratio) * bound, count, bits=bits)
    rows = jnp.concatenate([rows for rows, _ in lookups])
    steps = exact.split(jnp.concatenate([values.astype(wide) for _, values in lookups]))

    def total(rows: jax.Array, size: int) -> jax.Array:
        # A scatter that is fused with other operations takes twice as long to compile on TPU.
        at, *parts = lax.optimization_barrier((rows, *steps))
        sums = [jnp.zeros((size, x.shape[1]), x.dtype).at[at].add(x) for x in parts]
        return exact.join(*lax.optimization_barrier(sums))

    if rows.shape[0] >= size:
        return table + total(rows, size)
    # Only the rows that occur are summed, since two more tables would need more memory.
    found, slots = _join_equal(rows, size)
    with jax.named_scope(ANY_ORDER):  # `found` has each row once
        return table.at[found].add(total(slots, len(found)), mode="drop", unique_indices=True)


def _join_equal(rows: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the distinct rows of a table, and the place of each row (N,) among them.

    A row is at the place where it last occurs. All other places hold rows beyond the table.
    """
    rows, numbers = rows.astype(jnp.int32), jnp.arange(len(rows), dtype=jnp.int32)
    # A maximum does not depend on the order of updates, unlike the first or last write.
    places = jnp.zeros(size, jnp.int32).at[rows].max(numbers)[rows]
    return jnp.where(places == numbers, rows, size + numbers), places


def lookup_rounding(
    columns: int, *, products: int, examples: int, ratio: float, largest_summand: float
) -> Rounding:
    """Bounds how one example changes the rounding of the sums in `add_lookups`."""
    rounding = _scatter_rounding(products, examples, ratio)
    if rounding is None:
        total = examples * largest_summand
        largest = max(total, ratio)
        rounding = step_rounding(products * examples, products, columns, largest, total)
    return rounding


def _scatter_rounding(products: int, examples: int, ratio: float) -> Rounding | None:
    """Bounds how one example changes a scatter; `None` if it changes too much."""
    if products * examples * UNIT_ROUNDOFF >= 0.5:
        return None
    # A scatter is one block with all examples in it.
    change = block_rounding(examples, examples, products=products, ratio=ratio).blocks
    return Rounding(joined=change, termwise=True) if change <= ROUNDING_LIMIT else None


def check_capacity(clip: Clip, step: float, examples: int) -> None:
    """Raises an error if the sum of these clipped gradients may overflow int32."""
    largest = examples * (clip.sensitivity / step + 1.0)
    if largest > LARGEST_GRID_SUM:
        raise ValueError(
            f"The sum must be at most {LARGEST_GRID_SUM:.3g} grid steps, to fit into int32 with "
            f"its noise, got {largest:.3g} for grid={step}, {examples} examples and "
            f"sensitivity {clip.sensitivity}. Call `dpoptax.extend.fixed_point_grid` with the size "
            "of the padded batch."
        )
