"""Rows that are selected by noisy counts, and the noise of gradients by these rows alone."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax._clip.clipped_sum import ClippedSum
from dpoptax._marks import COUNTED, RELEASE, SELECTED, mark
from dpoptax._noise.gaussian import GaussianNoiseState, noisy_mean_of
from dpoptax._noise.ledger import Mechanism, begin, check_mechanism, imprint_of
from dpoptax._noise.release import check_same_clip, release
from dpoptax._random.keys import check_threefry_key, marked_as_noise
from dpoptax._serialization import serializable
from dpoptax._tree import PyTree
from dpoptax.tables._row_selection import RowCounts, RowSelectingClip, RowSelection, count_rows

# Folded into a step's key for its rows: no leaf of a gradient has this number.
_ROWS = 2**32 - 3


class SelectedRows(NamedTuple):
    """Rows of a table that were released.

    Attributes:
      rows: int32 (capacity,), ascending; filled with table_size, which stands for no row.
      number: how many were selected, an int32 scalar. Above `capacity` some were left out, at
        random: raise the threshold or the capacity.
    """

    rows: jax.Array
    number: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReleaseContext:
    """Which release a sum is for: that whose rows its gradients are of.

    Attributes:
      count: of the releases before, int32.
      key: the fingerprint of the noise stage's key.
    """

    count: jax.Array
    key: jax.Array


@serializable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSelectingNoiseState:
    """State of `row_selecting_noise`.

    Attributes:
      noise: the noise stage's, with the ledger.
    """

    noise: GaussianNoiseState


def row_selecting_noise(
    clip: RowSelectingClip, *, noise_multiplier: float, batch_size: float, key: jax.Array
) -> optax.GradientTransformation:
    """`gaussian_noise` for a `row_selecting_clip`: for both releases of a step.

        release_t = (Σ_ξ clip(g_S(ξ)) + σ/√(1 − ρ) C N(0, I)) / B

    Input: the `ClippedSum` of `selected_grad`, which selected the rows S by this stage's σ and key.
    Output: a mean, by the rows of S and the other parameters. The state is for σ and the key, and
    has nothing of the table's size.

    Privacy: each update is, together with its rows, one release of the Gaussian mechanism with
    noise multiplier σ = `noise_multiplier`, and the ledger says so. A sum whose rows are of another
    state than this one is not released: the update is NaN, and the ledger says why. Rows that were
    selected by `selected_grad` and never came to an update are in no ledger.

    Args:
      clip: the same geometry that `selected_grad` got.
      noise_multiplier: σ, for rows and gradient together; 0 for no noise and ε = ∞.
      batch_size: B, the expected number of examples.
      key: a key from `jax.random.key`.

    Raises:
      TypeError: a `clip` that is no `row_selecting_clip`; at `update`, gradients that are not its
        `ClippedSum`.
      ValueError: as `gaussian_noise`; a threshold that noise alone exceeds for more rows than
        `capacity`.

    >>> import dpoptax
    >>> from dpoptax import tables
    >>> selection = tables.RowSelection(table_size=1000, capacity=50, threshold=20.0)
    >>> clip, key = tables.row_selecting_clip(dpoptax.l2_clip(1.0), selection), jax.random.key(0)
    >>> tx = tables.row_selecting_noise(clip, noise_multiplier=1.0, batch_size=64, key=key)
    >>> dpoptax.ledgers(tx.init({}))[0].releases
    0
    """
    if not isinstance(clip, RowSelectingClip):
        raise TypeError(f"clip={clip!r}: want a dpoptax.tables.row_selecting_clip(...)")
    mechanism = Mechanism(*check_mechanism(noise_multiplier, batch_size))
    key = check_threefry_key(key)
    _check_false(clip.selection, _selecting(clip, mechanism))

    def init_fn(params: PyTree) -> RowSelectingNoiseState:
        return RowSelectingNoiseState(GaussianNoiseState(**begin(mechanism, key, params)))

    def update_fn(
        updates: PyTree, state: RowSelectingNoiseState, params: PyTree = None
    ) -> tuple[PyTree, RowSelectingNoiseState]:
        def noisy_mean(clipped: ClippedSum, step_key: jax.Array) -> tuple[PyTree, None]:
            check_same_clip(clipped, clip, "row_selecting_clip")
            return noisy_mean_of(clipped, mechanism, state.noise.count, step_key), None

        def belongs(clipped: ClippedSum) -> jax.Array:
            made, next_release = clipped.reference, release_context(state)
            if not isinstance(made, ReleaseContext):
                raise TypeError(
                    "nobody selected the rows of this sum: take it with "
                    "dpoptax.tables.selected_grad, which selects them by this stage's noise"
                )
            return jnp.array_equal(made.key, next_release.key) & (made.count == next_release.count)

        released, _, noise = release(
            updates, state.noise, params, mechanism, noisy_mean, belongs=belongs
        )
        return mark(released, COUNTED), RowSelectingNoiseState(noise)

    return optax.GradientTransformation(init_fn, update_fn)


def release_context(state: RowSelectingNoiseState) -> ReleaseContext:
    """The release that comes next."""
    return ReleaseContext(state.noise.count, imprint_of(state.noise).key)


def select_release_rows(
    state: RowSelectingNoiseState, clip: RowSelectingClip, lookups: jax.Array, mask: jax.Array
) -> SelectedRows:
    """The rows of the release that comes next: a release of its own, with multiplier σ/√ρ."""
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
    """{j : count_j + σ√m N(0, 1) ≥ τ}, cut to `capacity`, without a number for each row.

    Rows are independent. One with a count is selected with probability Q((τ − count)/(σ√m)). One
    without is with p = Q(τ/(σ√m)): so is every row that is hit by N positions, drawn uniformly
    with replacement, where N is from the Poisson distribution with mean −V log(1 − p), as the
    hits of each row are then independent, and there are none with probability 1 − p. All is in
    tails that are exact to float32's relative error: of normal numbers of 23 bits, none is above
    5.4 standard deviations.
    """
    size, capacity = selection.table_size, selection.capacity
    stddev = noise_multiplier * math.sqrt(selection.rows_per_example)
    _check_false(selection, noise_multiplier)
    keys = jax.random.split(marked_as_noise(key), 4)

    missing = counts.missing.astype(jnp.float32) * np.float32(2.0**-counts.bits)
    if stddev == 0.0:
        chosen = counts.missing <= 0
    else:
        tail = 0.5 * jax.lax.erfc(jnp.abs(missing) / np.float32(stddev * math.sqrt(2)))
        chosen = (_uniform(keys[0], missing.shape) < tail) == (missing > 0)
    looked_up = jnp.where(chosen & (counts.rows < size), counts.rows, size)

    threshold = selection.units(counts.bits) * 2.0**-counts.bits  # that of the others
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
    # What is left out is drawn from S alone: not by counts, nor by whether examples looked it up,
    # which the place of a row among equal bits would tell.
    order = jax.random.bits(keys[3], found.shape, jnp.uint32)
    _, _, shuffled = jax.lax.sort((found == size, order, found), num_keys=3)
    number = jnp.sum(found < size, dtype=jnp.int32)
    selected = SelectedRows(jnp.sort(shuffled[:capacity]), number)
    return mark(selected, RELEASE) if noise_multiplier > 0.0 else selected


def _tail(threshold: float, stddev: float) -> float:
    """Q(τ/s), the probability that noise alone reaches the threshold."""
    return 0.5 * math.erfc(threshold / (stddev * math.sqrt(2))) if stddev else 0.0


def _check_false(selection: RowSelection, noise_multiplier: float) -> None:
    stddev = noise_multiplier * math.sqrt(selection.rows_per_example)
    expected = selection.table_size * _tail(selection.threshold, stddev)
    if expected > selection.capacity:
        raise ValueError(
            f"threshold={selection.threshold} is {selection.threshold / stddev:.3g} standard "
            f"deviations of the noise on a count, which is {stddev:.4g}: noise alone selects "
            f"{expected:.3g} of {selection.table_size} rows, and capacity={selection.capacity}. "
            "Raise the threshold, the share of the selection, or the capacity"
        )


def _poisson_limits(size: int, probability: float) -> np.ndarray:
    """2⁶⁴ times the Poisson distribution's function at 0, 1, …, as two words each, (n, 2)."""
    mean = -size * math.log1p(-probability)
    most = math.ceil(mean + 10 * math.sqrt(mean) + 40)
    logs = [k * math.log(mean) - mean - math.lgamma(k + 1) if mean else -math.inf * k
            for k in range(1, most)]  # fmt: skip
    below = np.cumsum([math.exp(-mean), *map(math.exp, logs)])
    limits = [min(int(x * 2.0**64), 2**64 - 1) for x in below.tolist()]
    return np.array([divmod(x, 2**32) for x in limits], np.uint32)


def _count_above(limits: np.ndarray, key: jax.Array) -> jax.Array:
    """How many limits a number of 64 random bits is not below."""
    high, low = jax.random.bits(key, (2,), jnp.uint32)
    return jnp.sum((high > limits[:, 0]) | ((high == limits[:, 0]) & (low >= limits[:, 1])))


def _uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Uniform on [0, 1] in float32, with all its digits near 0, down to 2⁻⁶⁴."""
    high, low = jax.random.bits(key, (2, *shape), jnp.uint32).astype(jnp.float32)
    return high * np.float32(2.0**-32) + low * np.float32(2.0**-64)
