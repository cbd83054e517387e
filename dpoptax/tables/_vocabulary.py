"""Private selection of a vocabulary, once before training."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpoptax import _pricing
from dpoptax._random.keys import check_key, words_of
from dpoptax._release.ledger import check_mechanism
from dpoptax._support.fingerprints import key_fingerprint
from dpoptax.tables._row_selecting_noise import draw_rows
from dpoptax.tables._row_selection import RowSelection, count_rows

if TYPE_CHECKING:
    from dpoptax._pricing.privacy_event import PrivacyEvent


class Vocabulary(NamedTuple):
    """Result of `select_rows`.

    Attributes:
      rows: ascending, int32 (k,).
      selected: the number of selected rows before the cut to the capacity.
      event: the privacy event of the selection, for `also` of `dpoptax.accounting.guarantee`
        and `calibrate`.
    """

    rows: np.ndarray
    selected: int
    event: "PrivacyEvent"


def select_rows(
    lookups: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    selection: RowSelection,
    noise_multiplier: float,
    key: jax.Array,
) -> Vocabulary:
    """Selects the rows of a table to train, once for all steps (DP-FEST).

    It selects by noisy counts the rows that many training examples look up; see `RowSelection`.
    Then train the values of these rows with `clipped_grad`, like any parameter.

    Privacy: one release of the Gaussian mechanism with multiplier σ = `noise_multiplier`, on the
    whole data set. Ledgers do not record it: pass its `event` to `guarantee(also=[...])`.

    Args:
      lookups: the rows that each example (or each user with all records) looks up, integers (N, …).
        Numbers outside [0, table_size), such as −1, are ignored.
      mask: (N,), False for padding. `None` if there is no padding.
      selection: V, k, τ, in examples of the data set, and m.
      noise_multiplier: σ.
      key: a key that is not used elsewhere. Keep it as secret as the data.

    Raises:
      TypeError: the lookups are not integers, or `key` is not a key.
      ValueError: the multiplier is negative or not finite; noise alone is expected to select more
        than `capacity` rows; or no row is selected.

    Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
    Models", 2023 (DP-FEST), with a threshold instead of the top k.

    >>> lookups = jnp.arange(3000) % 3  # three rows, by a thousand examples each
    >>> selection = RowSelection(table_size=10**6, capacity=10, threshold=500.0)
    >>> found = select_rows(
    ...     lookups, selection=selection, noise_multiplier=20.0, key=jax.random.key(0)
    ... )
    >>> found.rows
    array([0, 1, 2], dtype=int32)
    """
    if not isinstance(selection, RowSelection):
        raise TypeError(f"`selection` must be a `dpoptax.tables.RowSelection`, got {selection!r}.")
    noise_multiplier, _ = check_mechanism(noise_multiplier, 1)
    key, lookups = check_key(key), jnp.asarray(lookups)
    which = jnp.ones(lookups.shape[0], bool) if mask is None else jnp.asarray(mask).astype(bool)
    if which.shape != lookups.shape[:1]:
        raise ValueError(f"`mask` must have shape ({lookups.shape[0]},), got {which.shape}.")

    @jax.jit
    def selected(lookups: jax.Array, mask: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        return draw_rows(count_rows(lookups, mask, selection), selection, noise_multiplier, key)

    rows, number = map(np.asarray, selected(lookups, which, key))
    rows = rows[rows < selection.table_size]
    if not rows.size:
        raise ValueError(
            f"No row was selected with threshold={selection.threshold}. Decrease the threshold. "
            "This attempt is also a release and has a privacy cost."
        )
    return Vocabulary(rows, int(number), event_of_release(noise_multiplier, key))


def event_of_release(noise_multiplier: float, key: jax.Array) -> "PrivacyEvent":
    """Returns the event of one release of all data, with the noise of a key."""
    event = _pricing.events.noisy_sum_event(noise_multiplier, 1)
    keys = frozenset([key_fingerprint(words_of(key))])
    return _pricing.privacy_event.PrivacyEvent(event, keys=keys)
