"""Row selection by noisy counts, and noise on the gradients of these rows."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clipped_sum.clipped_sum import ClippedSum
from dpoptax._random.keys import check_threefry_key
from dpoptax._release.gaussian import noisy_mean_of
from dpoptax._release.ledger import Mechanism, NoiseState, begin, check_mechanism
from dpoptax._release.release import release
from dpoptax._support.marks import COUNTED, NOISE, RELEASE, SELECTED, mark
from dpoptax._support.serialization import SerializableState
from dpoptax._support.tree import PyTree
from dpoptax.tables._row_selection import RowCounts, RowSelectingClip, RowSelection, count_rows

# Folded into a step's key to select rows. No leaf of a gradient has this number.
_ROWS = 2**32 - 3


class SelectedRows(NamedTuple):
    """Released row numbers of a table.

    Attributes:
      rows: int32 (capacity,), ascending, padded with table_size.
      number: the number of selected rows, an int32 scalar. If it exceeds `capacity`, random rows
        were left out: raise the threshold or the capacity.
    """

    rows: jax.Array
    number: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """Identifier of the release to which a sum belongs.

    Attributes:
      count: the number of earlier releases, int32.
      key: the fingerprint of the noise stage's key.
    """

    count: jax.Array
    key: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSelectingNoiseState(SerializableState):
    """State of `row_selecting_noise`.

    Attributes:
      noise: the state of the noise stage, with the ledger.
    """

    noise: NoiseState


def row_selecting_noise(
    clip: RowSelectingClip, *, noise_multiplier: float, batch_size: float, key: jax.Array
) -> optax.GradientTransformation:
    """Adds Gaussian noise for a `row_selecting_clip`, for both releases of a step.

        release_t = (Σ_ξ clip(g_S(ξ)) + σ/√(1 − ρ) C N(0, I)) / B

    Input: the `ClippedSum` of `selected_grad`, which selects the rows S with this stage's σ and
    key. Output: a mean, for the rows of S and the other parameters. The state does not grow with
    the table.

    Privacy: each update together with its rows is one release of the Gaussian mechanism with noise
    multiplier σ = `noise_multiplier`, and the ledger records it as such. If the rows of a sum were
    selected with another state, the update is NaN and the ledger records the reason. The ledger
    does not count rows that `selected_grad` selected but that never reached an update.

    Args:
      clip: the clip of `selected_grad`.
      noise_multiplier: σ, for rows and gradient together. 0 adds no noise and gives ε = ∞.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.

    Raises:
      TypeError: `clip` is not a `row_selecting_clip`. At `update`: the gradients are not the
        `ClippedSum` of `clip`.
      ValueError: as in `gaussian_noise`, or noise alone is expected to select more than `capacity`
        rows.

    >>> import dpoptax
    >>> from dpoptax import tables
    >>> selection = tables.RowSelection(table_size=1000, capacity=50, threshold=20.0)
    >>> clip, key = tables.row_selecting_clip(dpoptax.l2_clip(1.0), selection), jax.random.key(0)
    >>> tx = tables.row_selecting_noise(clip, noise_multiplier=1.0, batch_size=64, key=key)
    >>> dpoptax.ledgers(tx.init({}))[0].releases
    0
    """
    if not isinstance(clip, RowSelectingClip):
        raise TypeError(f"`clip` must be a `dpoptax.tables.row_selecting_clip`, got {clip!r}.")
    mechanism = Mechanism(*check_mechanism(noise_multiplier, batch_size))
    key = check_threefry_key(key)
    _check_false(clip.selection, _selecting(clip, mechanism))

    def init_fn(params: PyTree) -> RowSelectingNoiseState:
        return RowSelectingNoiseState(begin(mechanism, key, params))

    def update_fn(
        updates: PyTree, state: RowSelectingNoiseState, params: PyTree = None
    ) -> tuple[PyTree, RowSelectingNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
            return noisy_mean_of(clipped, mechanism, state.noise.count, step_key), None

        def belongs(clipped: ClippedSum) -> jax.Array:
            made, next_release = clipped.reference, release_context(state)
            if not isinstance(made, ReleaseContext):
                raise TypeError(
                    "The rows of this sum were not selected with this stage's noise. Compute it "
                    "with `dpoptax.tables.selected_grad`."
                )
            return jnp.array_equal(made.key, next_release.key) & (made.count == next_release.count)

        noise: Any = getattr(state, "noise", state)  # a state restored without a target has none
        released, _, noise = release(
            updates, noise, params, mechanism, noisy_mean, clip=clip, belongs=belongs
        )
        return mark(released, COUNTED), RowSelectingNoiseState(noise)

    return optax.GradientTransformation(init_fn, update_fn)


def release_context(state: RowSelectingNoiseState) -> ReleaseContext:
    """Returns the identifier of the next release."""
    return ReleaseContext(state.noise.count, state.noise.imprint.key)


def select_release_rows(
    state: RowSelectingNoiseState, clip: RowSelectingClip, lookups: jax.Array, mask: jax.Array
) -> SelectedRows:
    """Selects the rows of the next release, with multiplier σ/√ρ."""
    step_key = jax.random.fold_in(state.noise.key, state.noise.count)
    counts = count_rows(lookups, mask, clip.selection)
    multiplier = _selecting(clip, state.noise.mechanism)
    rows_key = jax.random.fold_in(step_key, _ROWS)
    return mark(draw_rows(counts, clip.selection, multiplier, rows_key), SELECTED)


def _selecting(clip: RowSelectingClip, mechanism: Mechanism) -> float:
    return mechanism.noise_multiplier / math.sqrt(clip.share)


def draw_rows(
    counts: RowCounts, selection: RowSelection, noise_multiplier: float, key: jax.Array
) -> SelectedRows:
    """Returns {j : count_j + σ√m N(0, 1) ≥ τ}, cut to `capacity`.

    It does not draw a number for each row of the table. Rows are independent. A row with a count is
    selected with probability Q((τ − count)/(σ√m)), and a row without a count with p = Q(τ/(σ√m)).
    To draw rows without a count, N positions are drawn uniformly with replacement, with N from the
    Poisson distribution with mean −V log(1 − p). The hits of each row are then independent, and a
    row has none with probability 1 − p. Tails are exact to the relative error of float32. Normal
    numbers from 23 bits would not exceed 5.4 standard deviations.
    """
    size, capacity = selection.table_size, selection.capacity
    stddev = noise_multiplier * math.sqrt(selection.rows_per_example)
    _check_false(selection, noise_multiplier)
    keys = jax.random.split(mark(key, NOISE), 4)

    missing = counts.missing.astype(jnp.float32) * np.float32(2.0**-counts.bits)
    if stddev == 0.0:
        chosen = counts.missing <= 0
    else:
        # `tail` is the probability of the less likely outcome, which float32 resolves near 0.
        tail = 0.5 * jax.lax.erfc(jnp.abs(missing) / np.float32(stddev * math.sqrt(2)))
        chosen = (_uniform(keys[0], missing.shape) < tail) == (missing > 0)
    looked_up = jnp.where(chosen & (counts.rows < size), counts.rows, size)

    threshold = selection.units(counts.bits) * 2.0**-counts.bits  # of rows without a count
    # A Poisson number of uniform positions hits each row without a count with probability p.
    limits = _poisson_limits(size, _tail(threshold, stddev))
    positions = jax.random.randint(keys[1], limits.shape[:1], 0, size, jnp.int32)
    drawn = jnp.arange(len(limits)) < _count_above(limits, keys[2])
    positions = jnp.sort(jnp.where(drawn, positions, size))
    again = jnp.concatenate([jnp.zeros(1, bool), positions[1:] == positions[:-1]])
    place = jnp.minimum(jnp.searchsorted(counts.rows, positions), len(counts.rows) - 1)
    known = counts.rows[place] == positions
    others = jnp.where(again | known, size, positions)

    found = jnp.concatenate([looked_up, others])
    found = jnp.concatenate([found, jnp.full(max(0, capacity - found.size), size, found.dtype)])
    # Rows beyond the capacity are left out at random. The choice must depend only on S, not on
    # counts or on lookups, which the order of rows with equal bits would reveal.
    order = jax.random.bits(keys[3], found.shape, jnp.uint32)
    _, _, shuffled = jax.lax.sort((found == size, order, found), num_keys=3)
    number = jnp.sum(found < size, dtype=jnp.int32)
    selected = SelectedRows(jnp.sort(shuffled[:capacity]), number)
    return mark(selected, RELEASE) if noise_multiplier > 0.0 else selected


def _tail(threshold: float, stddev: float) -> float:
    """Returns Q(τ/s), the probability that noise alone reaches the threshold."""
    return 0.5 * math.erfc(threshold / (stddev * math.sqrt(2))) if stddev else 0.0


def _check_false(selection: RowSelection, noise_multiplier: float) -> None:
    stddev = noise_multiplier * math.sqrt(selection.rows_per_example)
    expected = selection.table_size * _tail(selection.threshold, stddev)
    if expected > selection.capacity:
        raise ValueError(
            f"Noise alone must select at most capacity={selection.capacity} rows, but is expected "
            f"to select {expected:.3g} of {selection.table_size}: "
            f"threshold={selection.threshold} is {selection.threshold / stddev:.3g} standard "
            f"deviations of the noise on a count, {stddev:.4g}. Increase the threshold, the share "
            "of the selection, or the capacity."
        )


def _poisson_limits(size: int, probability: float) -> np.ndarray:
    """Returns 2⁶⁴ times the Poisson distribution function at 0, 1, …, (n, 2).

    Each value is stored as two 32-bit words.
    """
    mean = -size * math.log1p(-probability)
    most = math.ceil(mean + 10 * math.sqrt(mean) + 40)
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) if mean else -math.inf * k
            for k in range(1, most)]  # fmt: skip
    below = np.cumsum([math.exp(-mean), *map(math.exp, logs)])
    limits = [min(int(x * 2.0**64), 2**64 - 1) for x in below.tolist()]
    return np.array([divmod(x, 2**32) for x in limits], np.uint32)


def _count_above(limits: np.ndarray, key: jax.Array) -> jax.Array:
    """Returns the number of limits that a random 64-bit number reaches."""
    high, low = jax.random.bits(key, (2,), jnp.uint32)
    return jnp.sum((high > limits[:, 0]) | ((high == limits[:, 0]) & (low >= limits[:, 1])))


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws uniformly on [0, 1] in float32, with full precision near 0, down to 2⁻⁶⁴."""
    high, low = jax.random.bits(key, (2, *shape), jnp.uint32).astype(jnp.float32)
    return high * np.float32(2.0**-32) + low * np.float32(2.0**-64)
