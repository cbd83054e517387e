"""Large tables, of which a run trains few rows.

The gradient of an embedding table is zero in rows that no example looks up, but DP-SGD adds noise
to all rows. If the trained rows are public, time and memory depend only on these rows. They are
then an ordinary parameter, for any clip, noise, method and optimizer:

    vocabulary = select_rows(lookups, …)  # or any rows that are public
    rows = take_rows(table, vocabulary.rows)  # the parameter
    located = locate(lookups, vocabulary.rows, table)  # in the batch
    look_up(rows, located)  # in the loss
    table = put_rows(table, vocabulary.rows, rows)  # after the run

The rows that occur in a batch are private: adding noise only to these would reveal its examples.

Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
Models", 2023.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpoptax import _pricing
from dpoptax._random.discrete_gaussian import discrete_gaussian
from dpoptax._random.keys import check_noise_key, words_of
from dpoptax._release.fixed_point import stddev_in_steps
from dpoptax._release.ledger import check_noise_and_batch_size
from dpoptax._support.argument_checks import integer

if TYPE_CHECKING:
    from dpoptax._pricing.privacy_event import PrivacyEvent

__all__ = ["Located", "Vocabulary", "locate", "look_up", "put_rows", "select_rows", "take_rows"]


def __dir__() -> list[str]:
    return __all__


# The largest row number.
_MAX_INDEX = 2**31 - 1
# Counts are multiples of a power of two, of which their noise has about 2^16 as its standard
# deviation. Finer units would make tables of the discrete Gaussian larger.
_NOISE_BITS, _LEAST_BITS, _MOST_BITS = 16, 4, 20


class Located(NamedTuple):
    """Lookups with their places among the trained rows; see `locate`.

    Attributes:
      slots: places among the trained rows, int32 (…); their number if a row is not trained.
      frozen: the table's values for rows that are not trained, (…, d); `None` for zeros.
    """

    slots: jax.Array
    frozen: jax.Array | None


class Vocabulary(NamedTuple):
    """Result of `select_rows`. Public, at the price of `event`.

    Attributes:
      rows: the selected rows, ascending, int32 (k,).
      counts: the noisy counts of all rows, (V,) float64. Other rows may be chosen by them, at no
        further cost.
      event: the privacy event of the selection, for `also` of `dpoptax.accounting.guarantee`
        and `calibrate`.
    """

    rows: np.ndarray
    counts: np.ndarray
    event: "PrivacyEvent"


def look_up(table: ArrayLike, lookups: ArrayLike | Located) -> jax.Array:
    """Returns the looked-up rows of a table, in training and evaluation alike.

    Args:
      table: (V, d), or (k, d) of trained rows.
      lookups: integers (…), row numbers of the whole table, or the result of `locate`.

    Returns:
      (…, d); zeros for numbers outside the table, such as −1 for padding.

    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> look_up(table, jnp.array([1, -1]))
    Array([[3., 4.],
           [0., 0.]], dtype=float32)
    """
    values = jnp.asarray(table)
    if not isinstance(lookups, Located):
        return take_rows(values, _table_rows(jnp.asarray(lookups), values.shape[0]))
    found = take_rows(values, lookups.slots)
    if lookups.frozen is None:
        return found
    trained = (lookups.slots < values.shape[0])[..., None]
    return jnp.where(trained, found, lookups.frozen.astype(found.dtype))


def locate(lookups: ArrayLike, rows: ArrayLike, table: jax.Array | None = None) -> Located:
    """Finds lookups among the trained rows, for `look_up` in the loss.

    The rows are the same in all steps: a public vocabulary, or one from `select_rows`. Their
    values, `take_rows(table, rows)`, are an ordinary parameter for any clip, noise and optimizer,
    at the cost of k rows.

    Privacy: the result depends on each example separately and on `rows`, which must be public.

    Args:
      lookups: integers (…), row numbers of the whole table.
      rows: (k,), ascending and distinct.
      table: (V, d), the values of rows that are not trained, without gradient. `None` for zeros.

    Raises:
      TypeError: the lookups are not integers.
      ValueError: `rows` is empty.

    >>> locate(jnp.array([7, 3, 5]), jnp.array([3, 7])).slots
    Array([1, 0, 2], dtype=int32)
    """
    rows = jnp.asarray(rows)
    if rows.ndim != 1 or not rows.size:
        raise ValueError(f"`rows` must have shape (k,) with k at least 1, got {rows.shape}.")
    size = _MAX_INDEX if table is None else table.shape[0]
    wanted = _table_rows(jnp.asarray(lookups), size)
    place = jnp.minimum(jnp.searchsorted(rows, wanted), rows.size - 1)
    known = (rows[place] == wanted) & (wanted < size)
    slots = jnp.where(known, place, rows.size).astype(jnp.int32)
    return Located(slots, None if table is None else take_rows(table, wanted))


def take_rows(table: jax.Array, rows: ArrayLike) -> jax.Array:
    """Returns table[rows], (…, d), with zeros for numbers of V or more.

    Numbers must not be negative.

    >>> take_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, 2])).tolist()
    [[2.0], [0.0]]
    """
    return table.at[jnp.asarray(rows)].get(mode="fill", fill_value=0)


def put_rows(table: jax.Array, rows: ArrayLike, values: jax.Array) -> jax.Array:
    """Returns the table with new values in the given rows, ignoring numbers from V on.

    A donated table is written in place, in time independent of V.

    >>> put_rows(jnp.zeros((3, 1)), jnp.array([1, 3]), jnp.ones((2, 1))).tolist()
    [[0.0], [1.0], [0.0]]
    """
    return table.at[jnp.asarray(rows)].set(values.astype(table.dtype), mode="drop")


def select_rows(
    lookups: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    table_size: int,
    vocabulary_size: int,
    noise_multiplier: float,
    key: jax.Array,
    rows_per_example: int = 1,
) -> Vocabulary:
    """Selects the rows of a table to train, once for all steps (DP-FEST).

        the k largest of  Σ_i min(1, √(m/m_i)) [example i looks up row j] + σ√m N(0, 1)

    m_i is the number of distinct rows that example i looks up. Then train the values of these rows
    with `clipped_grad`, like any parameter.

    Privacy: one release of the Gaussian mechanism with multiplier σ = `noise_multiplier`, on the
    whole data set, for every bit, as `dpoptax.gaussian_noise(fixed_point=True)`. An example changes
    the counts by at most √m in l2 norm, for any lookups. Ledgers do not record the release: pass
    its `event` to `guarantee(also=[...])`. The numbers below are public: choose them without
    looking at the data.

    Args:
      lookups: the rows that each example (or each user with all records) looks up, integers (N, …).
        Numbers outside [0, table_size), such as −1, are ignored.
      mask: (N,), False for padding. `None` for none.
      table_size: V, the number of rows.
      vocabulary_size: k, the number of rows to select.
      noise_multiplier: σ > 0.
      key: a key that is not used elsewhere, such as `dpoptax.random_key_from_os()`. Keep it secret.
      rows_per_example: m. Examples that look up more rows get a smaller weight for each.

    Raises:
      TypeError: the lookups are not integers, or `key` is not a key.
      ValueError: a number is out of range, or `mask` has another shape.

    Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
    Models", 2023 (DP-FEST).

    >>> lookups = jnp.arange(3000) % 3  # three rows, by a thousand examples each
    >>> found = select_rows(
    ...     lookups, table_size=10**5, vocabulary_size=3, noise_multiplier=20.0,
    ...     key=jax.random.key(0),
    ... )
    >>> found.rows
    array([0, 1, 2], dtype=int32)
    """
    size = integer("table_size", table_size, 1, "it is the number of rows")
    most = integer("vocabulary_size", vocabulary_size, 1, "it is the number of rows to train")
    bound = integer("rows_per_example", rows_per_example, 1, "it bounds the norm of the counts")
    noise_multiplier, _ = check_noise_and_batch_size(noise_multiplier, 1)
    if not (most <= size <= _MAX_INDEX and noise_multiplier > 0):
        raise ValueError(
            f"`vocabulary_size` must be at most `table_size`, `table_size` at most {_MAX_INDEX}, "
            f"and `noise_multiplier` positive, got {most}, {size} and {noise_multiplier}."
        )
    key, lookups = check_noise_key(key), np.asarray(lookups)
    which = np.ones(lookups.shape[:1], bool) if mask is None else np.asarray(mask, bool)
    if which.shape != lookups.shape[:1]:
        raise ValueError(f"`mask` must have shape {lookups.shape[:1]}, got {which.shape}.")
    stddev = noise_multiplier * math.sqrt(bound)
    bits = _NOISE_BITS - math.frexp(stddev)[1]
    unit = 2 ** min(max(bits, _LEAST_BITS), _MOST_BITS)
    noise = jax.jit(discrete_gaussian, static_argnums=(1, 2))
    drawn = np.asarray(noise(key, (size,), stddev_in_steps(stddev, 1 / unit)))
    counts = (count_rows(lookups[which], size, bound, unit) + drawn) / unit
    rows = np.sort(np.argsort(-counts, kind="stable")[:most]).astype(np.int32)
    event = _pricing.privacy_event.release_event(noise_multiplier, words_of(key))
    return Vocabulary(rows, counts, event)


def count_rows(lookups: np.ndarray, table_size: int, bound: int, unit: int) -> np.ndarray:
    """Returns the sums of ⌊u min(1, √(m/m_i))⌋ over the examples i that look up each row, (V,).

    One example changes them by at most u√m in l2 norm, exactly: its weight is an integer w with
    m_i w² ≤ m u². Sums of integers below 2⁵³ are exact in float64.
    """
    rows = np.asarray(_table_rows(lookups.reshape(len(lookups), -1), table_size))
    rows = np.sort(rows, axis=1)
    # Each row counts once per example.
    first = np.diff(rows, axis=1, prepend=-1) != 0
    first &= rows < table_size
    weights = [
        min(unit, math.isqrt(bound * unit**2 // max(number, 1)))
        for number in range(rows.shape[1] + 1)
    ]
    each = np.array(weights, float)[first.sum(axis=1)]
    each = np.broadcast_to(each[:, None], rows.shape)
    return np.bincount(rows[first], each[first], table_size).astype(np.int64)


def _table_rows(lookups: jax.Array | np.ndarray, table_size: int) -> jax.Array:
    """Returns row numbers as int32, with table_size for those outside [0, table_size)."""
    if not jnp.issubdtype(lookups.dtype, jnp.integer):
        raise TypeError(f"`lookups` must be integers, the row numbers, got {lookups.dtype}.")
    # Compares in the lookups' own dtype, because a narrower one would wrap around. If table_size
    # does not fit in it, no lookup is too large.
    fits = lookups >= 0
    if table_size <= jnp.iinfo(lookups.dtype).max:
        fits &= lookups < table_size
    return jnp.where(fits, lookups.astype(jnp.int32), table_size)
