"""Which rows of a table a batch looks up: counts that one example moves by a bounded length."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._clip.clip import Clip, as_clip, positive
from dpoptax._marks import CLIPPED, EXAMPLES, mark
from dpoptax._tree import PyTree

# Counts are whole multiples of a power of two, whose sum fits into int32.
_COUNT_BITS = 30
# Rows are numbered in int32, and one number more stands for none.
_MAX_ROWS = 2**31 - 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowSelection:
    """Which rows of a table are worth a gradient: those that enough examples look up, by noise.

        S = {j : Σ_i min(1, √(m/m_i)) [example i looks up row j] + σ√m N(0, 1) ≥ τ}

    with m_i the number of different rows that example i looks up, m = `rows_per_example`, τ =
    `threshold`, and σ the multiplier of the release that uses the selection. Of more than
    `capacity` rows in S that many are kept, drawn at random.

    Privacy: an example changes the counts by at most √m in l2 norm, whatever it looks up, so that
    S is one release of the Gaussian mechanism with multiplier σ. The rows of S that no example
    looked up are drawn without a number for each row of the table, by the same distribution. The
    numbers below are public: choose them without looking at the data.

    Attributes:
      table_size: V, the number of rows. Other numbers look up nothing.
      capacity: k, how many rows are kept at most: the size of the arrays.
      threshold: τ > 0, in examples of a batch. The higher, the fewer rows get into S by noise
        alone: V Q(τ/(σ√m)) of them in the mean, with Q the tail of the normal distribution.
      rows_per_example: m ≥ 1. Examples that look up more rows count less for each.

    Raises:
      ValueError, TypeError: a number outside its range, or none.

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
        """Raises where a number is outside its range."""
        for name in ("table_size", "capacity", "rows_per_example"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name}={value!r}: want a whole number, fixed before jit")
            if not 1 <= value <= _MAX_ROWS:
                raise ValueError(f"{name}={value}: want a number from 1 to {_MAX_ROWS}")
            object.__setattr__(self, name, int(value))
        object.__setattr__(self, "threshold", positive("threshold", self.threshold))
        if self.capacity > self.table_size:
            raise ValueError(
                f"capacity={self.capacity} is above table_size={self.table_size}: every row fits, "
                "so there is nothing to select; train the whole table with dpoptax.clipped_grad"
            )

    def units(self, bits: int) -> int:
        """τ in units of 2^-bits, rounded up."""
        return math.ceil(self.threshold * 2**bits)


@dataclasses.dataclass(frozen=True)
class RowSelectingClip(Clip):
    """A clip of the gradient of selected rows; see `row_selecting_clip`."""

    selects: ClassVar[bool] = True

    clip: Clip
    selection: RowSelection
    share: float

    @property
    def sensitivity(self) -> float:
        """C/√(1 − ρ): what σ is relative to, of which an example adds C at most."""
        return self.clip.sensitivity / math.sqrt(1.0 - self.share)

    def scaling(self, reference: PyTree) -> Clip:
        """The geometry that clips, whose sensitivity is what an example adds."""
        return self.clip.scaling(reference)

    def groups(self, tree: object) -> list[int]:
        """Those of the geometry that clips."""
        return self.clip.groups(tree)

    def factors(self, norms: jax.Array) -> jax.Array:
        """Those of the geometry that clips."""
        return self.clip.factors(norms)


def row_selecting_clip(
    clip: Clip | float, selection: RowSelection, *, share: float = 0.1
) -> RowSelectingClip:
    """A geometry for tables whose rows are selected anew in each step: DP-AdaFEST.

    Each step is two releases on one batch: the rows S by `selection` with multiplier σ/√ρ, and the
    gradient by the rows of S and all other parameters, clipped by `clip`, with σ/√(1 − ρ). Noise is
    drawn for the rows of S alone.

    Privacy: the two together cost what one release of the Gaussian mechanism with multiplier σ
    costs, as (√ρ/σ)² + (√(1 − ρ)/σ)² = 1/σ², whatever the sampler. σ is the noise stage's, and the
    ledger's.

    Args:
      clip: bounds the gradient of an example by C; a number C means `dpoptax.l2_clip(C)`. For
        clips that encode a gradient or follow the run it is refused.
      selection: which rows.
      share: ρ in (0, 1), how much of the privacy cost goes to the selection. The multipliers of the
        two releases are as √((1 − ρ)/ρ) to 1: as 3 to 1 at the default.

    Raises:
      TypeError: neither a geometry nor a number, one that encodes or follows, or no `RowSelection`.
      ValueError: `share` outside (0, 1).

    Source: Ghazi et al., 2023, Algorithm 1. What is clipped here is the gradient by S and the other
    parameters: rows that are not in S shorten nothing.

    >>> import dpoptax
    >>> selection = RowSelection(table_size=1000, capacity=50, threshold=5.0)
    >>> round(row_selecting_clip(dpoptax.l2_clip(1.0), selection, share=0.19).sensitivity, 3)
    1.111
    """
    clip = as_clip(clip)
    if clip.encodes or clip.followed or clip.selects:
        raise TypeError(
            f"clip={clip!r}: want a geometry that scales gradients as they are, such as "
            "dpoptax.l2_clip(1.0) or dpoptax.automatic_clip(1.0). One that encodes them, or keeps "
            "what it follows in the noise stage, would be followed over other rows in each step; "
            "with rows selected once, by dpoptax.tables.select_rows, every geometry will do"
        )
    if not isinstance(selection, RowSelection):
        raise TypeError(f"selection={selection!r}: want a dpoptax.tables.RowSelection(...)")
    if not 0.0 < share < 1.0:
        raise ValueError(f"share={share}: want a number in (0, 1)")
    return RowSelectingClip(clip, selection, float(share))


class RowCounts(NamedTuple):
    """How often the rows of a table are looked up in a batch. Private.

    Attributes:
      rows: the different rows that are looked up, ascending, int32 (n,); filled with table_size.
      missing: τ minus the count of each, in units of 2^-bits, int32 (n,).
      bits: of the fraction. Static.
    """

    rows: jax.Array
    missing: jax.Array
    bits: int


def table_rows(lookups: jax.Array, table_size: int) -> jax.Array:
    """The numbers of rows as int32, and table_size for what is outside of [0, table_size)."""
    lookups = jnp.asarray(lookups)
    if not jnp.issubdtype(lookups.dtype, jnp.integer):
        raise TypeError(f"lookups are {lookups.dtype}: want integers, the numbers of rows")
    # In its own dtype: a narrower one would wrap around, and one too narrow for the size has none
    # that are too large.
    fits = lookups >= 0
    if table_size <= jnp.iinfo(lookups.dtype).max:
        fits &= lookups < table_size
    return jnp.where(fits, lookups.astype(jnp.int32), table_size)


def count_rows(lookups: jax.Array, mask: jax.Array, selection: RowSelection) -> RowCounts:
    """Σ_i min(1, √(m/m_i)) for each row that is looked up, over the examples i that look it up.

    One example moves the counts by at most √m in l2 norm, exactly: its weight is a whole number w
    with m_i w² ≤ m 4^bits, and whole numbers add up to the same in any order.

    Args:
      lookups: the rows of each example, integers (B, …); those outside of the table are none.
      mask: which examples count, (B,).
      selection: τ and m.
    """
    lookups, mask = mark((jnp.asarray(lookups), mask), EXAMPLES)
    size, batch = selection.table_size, lookups.shape[0]
    rows = table_rows(lookups.reshape(batch, -1), size)
    rows = jnp.sort(jnp.where(mask[:, None], rows, size), axis=1)
    first = _starts(rows) & (rows < size)
    bits = _COUNT_BITS - max(batch, 1).bit_length()
    if selection.threshold > batch:
        raise ValueError(
            f"threshold={selection.threshold} is above the {batch} examples that there is room "
            "for: a row that all of them look up stays below it; lower it"
        )
    weights = jnp.asarray(_weights(rows.shape[1], selection.rows_per_example, bits))
    weight = jnp.where(first, weights[jnp.sum(first, axis=1)][:, None], 0)

    rows, weight = jax.lax.sort((rows.reshape(-1), weight.reshape(-1)), num_keys=1)
    starts = _starts(rows[None])[0]
    segment = jnp.cumsum(starts) - 1
    total = jax.ops.segment_sum(weight, segment, num_segments=rows.size)
    distinct = jnp.full(rows.shape, size, jnp.int32).at[segment].min(rows)
    distinct, missing = mark((distinct, selection.units(bits) - total), CLIPPED)
    return RowCounts(distinct, missing, bits)


def _starts(rows: jax.Array) -> jax.Array:
    """Where numbers along the last axis, ascending, differ from the one before."""
    before = jnp.concatenate([jnp.full_like(rows[:, :1], -1), rows[:, :-1]], axis=1)
    return rows != before


def _weights(most: int, bound: int, bits: int) -> np.ndarray:
    """⌊2^bits min(1, √(m/n))⌋ for n = 0, …, most, exactly."""
    return np.array(
        [min(2**bits, math.isqrt(bound * 4**bits // max(n, 1))) for n in range(most + 1)], np.int32
    )
