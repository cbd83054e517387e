"""Counts of looked-up rows, with bounded sensitivity."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._clips.clip import Clip, as_clip, positive
from dpoptax._support.marks import CLIPPED, EXAMPLES, mark
from dpoptax._support.tree import PyTree

# Counts are whole multiples of a power of two. Their sum fits in int32.
_COUNT_BITS = 30
# Row numbers are int32, and one more number is the padding.
_MAX_ROWS = 2**31 - 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSelection:
    """Selection of the table rows that many examples look up, by noisy counts.

        S = {j : Σ_i min(1, √(m/m_i)) [example i looks up row j] + σ√m N(0, 1) ≥ τ}

    m_i is the number of distinct rows that example i looks up, m = `rows_per_example`, τ =
    `threshold`, and σ is the multiplier of the release that uses the selection. If S has more than
    `capacity` rows, a random subset of that size is kept.

    Privacy: an example changes the counts by at most √m in l2 norm, for any lookups, so S is one
    release of the Gaussian mechanism with multiplier σ. Rows that no example looks up are drawn
    from the same distribution, without a random number for each. The numbers below are public:
    choose them without looking at the data.

    Attributes:
      table_size: V, the number of rows. Other numbers are ignored.
      capacity: k, the maximum number of rows, which is the size of the arrays.
      threshold: τ > 0, in examples per batch. Noise alone adds V Q(τ/(σ√m)) rows to S on average,
        with Q the tail of the normal distribution.
      rows_per_example: m ≥ 1. Examples that look up more rows get a smaller weight for each.

    Raises:
      ValueError: a number is out of range.
      TypeError: a value is not a number.

    Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
    Models", 2023, Algorithm 1 (DP-AdaFEST).

    >>> RowSelection(table_size=10**6, capacity=1024, threshold=30.0).rows_per_example
    1
    """

    table_size: int
    capacity: int
    threshold: float
    rows_per_example: int = 1

    def __post_init__(self) -> None:
        """Raises an error if a number is out of range."""
        for name in ("table_size", "capacity", "rows_per_example"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"`{name}` must be an integer, known before `jit`, got {value!r}.")
            if not 1 <= value <= _MAX_ROWS:
                raise ValueError(f"`{name}` must be between 1 and {_MAX_ROWS}, got {value}.")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "threshold", positive("threshold", self.threshold))
        if self.capacity > self.table_size:
            raise ValueError(
                f"`capacity` must be at most table_size={self.table_size}, got {self.capacity}. If "
                "every row fits, train the whole table with `dpoptax.clipped_grad`. To count votes "
                "for all rows, use `dpoptax.columns.release_counts`."
            )

    def units(self, bits: int) -> int:
        """Returns τ in units of 2^-bits, rounded up."""
        return math.ceil(self.threshold * 2**bits)


@dataclasses.dataclass(frozen=True)
class RowSelectingClip(Clip):
    """Clipping geometry of `row_selecting_clip`, for gradients of selected rows."""

    selects: ClassVar[bool] = True
    own_stage: ClassVar[str | None] = "dpoptax.tables.row_selecting_noise"

    clip: Clip
    selection: RowSelection
    share: float

    @property
    def sensitivity(self) -> float:
        """Returns C/√(1 − ρ), the scale of the noise; an example adds at most C."""
        return self.clip.sensitivity / math.sqrt(1.0 - self.share)

    def scaling(self, reference: PyTree) -> Clip:
        """Returns the inner clip, whose sensitivity is C."""
        del reference
        return self.clip

    def groups(self, tree: object) -> list[int]:
        """Returns the groups of the inner clip."""
        return self.clip.groups(tree)

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns the factors of the inner clip."""
        return self.clip.factors(norms)


def row_selecting_clip(
    clip: Clip | float, selection: RowSelection, *, share: float = 0.1
) -> RowSelectingClip:
    """Clips gradients for tables whose rows are selected in each step (DP-AdaFEST).

    Each step makes two releases from one batch. The first is the rows S of `selection`, with
    multiplier σ/√ρ. The second is the gradient of the rows of S and all other parameters, clipped
    by `clip`, with multiplier σ/√(1 − ρ). Noise is drawn only for the rows of S.

    Privacy: both together cost one release of the Gaussian mechanism with multiplier σ, because
    (√ρ/σ)² + (√(1 − ρ)/σ)² = 1/σ², for any sampler. σ is that of the noise stage and of the ledger.

    Args:
      clip: bounds the gradient of an example by C. A number C means `dpoptax.l2_clip(C)`. Clips
        that encode gradients or follow the run are not supported.
      selection: the `RowSelection`.
      share: ρ in (0, 1), the fraction of the privacy cost for the selection. The ratio of the two
        multipliers is √((1 − ρ)/ρ), which is 3 for the default.

    Raises:
      TypeError: `clip` is neither a clip nor a number, it encodes gradients or follows the run, or
        `selection` is not a `RowSelection`.
      ValueError: `share` is outside (0, 1).

    Source: Ghazi et al., 2023, Algorithm 1. Here the clip applies to the gradient of S and the
    other parameters, so rows outside S do not count toward its norm.

    >>> import dpoptax
    >>> selection = RowSelection(table_size=1000, capacity=50, threshold=5.0)
    >>> round(row_selecting_clip(dpoptax.l2_clip(1.0), selection, share=0.19).sensitivity, 3)
    1.111
    """
    clip = as_clip(clip)
    if clip.encodes or clip.own_stage:
        raise TypeError(
            "`clip` must only scale gradients, like `dpoptax.l2_clip(1.0)` or "
            f"`dpoptax.automatic_clip(1.0)`, got {clip!r}. Clips that encode gradients or follow "
            "the run do not work if the rows change in each step. To use one, select the rows "
            "once with `dpoptax.tables.select_rows`."
        )
    if not isinstance(selection, RowSelection):
        raise TypeError(f"`selection` must be a `dpoptax.tables.RowSelection`, got {selection!r}.")
    if not 0.0 < share < 1.0:
        raise ValueError(f"`share` must be in (0, 1), got {share}.")
    return RowSelectingClip(clip, selection, float(share))


class RowCounts(NamedTuple):
    """Counts of the rows of a table that a batch looks up. Private.

    Attributes:
      rows: the distinct rows that are looked up, ascending, int32 (n,), padded with table_size.
      missing: τ minus the count of each row, in units of 2^-bits, int32 (n,).
      bits: the number of fractional bits. Static.
    """

    rows: jax.Array
    missing: jax.Array
    bits: int


def table_rows(lookups: jax.Array, table_size: int) -> jax.Array:
    """Returns row numbers as int32, with table_size for those outside [0, table_size)."""
    lookups = jnp.asarray(lookups)
    if not jnp.issubdtype(lookups.dtype, jnp.integer):
        raise TypeError(f"`lookups` must be integers, the row numbers, got {lookups.dtype}.")
    # Compares in the lookups' own dtype, because a narrower one would wrap around. If table_size
    # does not fit in it, no lookup is too large.
    fits = lookups >= 0
    if table_size <= jnp.iinfo(lookups.dtype).max:
        fits &= lookups < table_size
    return jnp.where(fits, lookups.astype(jnp.int32), table_size)


def count_rows(lookups: jax.Array, mask: jax.Array, selection: RowSelection) -> RowCounts:
    """Returns Σ_i min(1, √(m/m_i)) over the examples i that look up each row.

    One example changes the counts by at most √m in l2 norm, exactly. Its weight is an integer w
    with m_i w² ≤ m 4^bits, and integers add exactly in any order.

    Args:
      lookups: the rows of each example, integers (B, …). Numbers outside the table are ignored.
      mask: (B,), True for examples.
      selection: τ and m.
    """
    lookups, mask = mark((jnp.asarray(lookups), mask), EXAMPLES)
    size, batch = selection.table_size, lookups.shape[0]
    rows = table_rows(lookups.reshape(batch, -1), size)
    rows = jnp.sort(jnp.where(mask[:, None], rows, size), axis=1)
    first = _starts(rows) & (rows < size)  # counts each row once per example
    # So many bits that the sum of all weights, at most one per example, fits in int32.
    bits = _COUNT_BITS - max(batch, 1).bit_length()
    if selection.threshold > batch:
        raise ValueError(
            f"`threshold` must be at most {batch}, the number of examples that fit in the batch, "
            f"got {selection.threshold}. Otherwise even a row that all examples look up is below "
            "it."
        )
    weights = jnp.asarray(_weights(rows.shape[1], selection.rows_per_example, bits))
    weight = jnp.where(first, weights[jnp.sum(first, axis=1)][:, None], 0)

    rows, weight = jax.lax.sort((rows.reshape(-1), weight.reshape(-1)), num_keys=1)
    # Each run of equal row numbers is a segment; its weights add up to the count of the row.
    starts = _starts(rows[None])[0]
    segment = jnp.cumsum(starts) - 1
    total = jax.ops.segment_sum(weight, segment, num_segments=rows.size)
    distinct = jnp.full(rows.shape, size, jnp.int32).at[segment].min(rows)
    distinct, missing = mark((distinct, selection.units(bits) - total), CLIPPED)
    return RowCounts(distinct, missing, bits)


def _starts(rows: jax.Array) -> jax.Array:
    """Returns a mask of the entries that start a new value; rows are ascending."""
    before = jnp.concatenate([jnp.full_like(rows[:, :1], -1), rows[:, :-1]], axis=1)
    return rows != before


def _weights(most: int, bound: int, bits: int) -> np.ndarray:
    """Returns ⌊2^bits min(1, √(m/n))⌋ for n = 0, …, most, exactly."""
    return np.array(
        [min(2**bits, math.isqrt(bound * 4**bits // max(n, 1))) for n in range(most + 1)], np.int32
    )
