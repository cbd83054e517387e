"""A vocabulary that is selected once, before the run: a release of its own."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from dpoptax._noise.ledger import check_mechanism
from dpoptax._random.check_key import check_key
from dpoptax.tables._row_selecting_noise import draw_rows
from dpoptax.tables._row_selection import RowSelection, count_rows

if TYPE_CHECKING:
    import dp_accounting as dpa


class Vocabulary(NamedTuple):
    """What `select_rows` returns.

    Attributes:
      rows: ascending, int32 (k,).
      selected: how many there were, before they were cut to the capacity.
      event: what the selection reveals, for `also` of `dpoptax.accounting.epsilon_spent` and
        `calibrate_noise_multiplier`.
    """

    rows: np.ndarray
    selected: int
    event: "dpa.DpEvent"


def select_rows(
    lookups: ArrayLike,
    mask: ArrayLike | None = None,
    *,
    selection: RowSelection,
    noise_multiplier: float,
    key: jax.Array,
) -> Vocabulary:
    """Selects the rows of a table to train, once and for all steps: DP-FEST.

    The rows that enough of all training examples look up, by noisy counts; see `RowSelection`. What
    comes after is `clipped_grad` by the values of these rows, as by any parameter.

    Privacy: one release of the Gaussian mechanism with multiplier σ = `noise_multiplier`, on the
    whole data set. No ledger knows of it: give its `event` to `epsilon_spent(also=[...])`.

    Args:
      lookups: which rows each example, or each user with all of its records, looks up, integers
        (N, …). Numbers outside of [0, table_size), such as −1, are none.
      mask: (N,), False for what is no example; `None` for all.
      selection: V, k, τ, in examples of the data set, and m.
      noise_multiplier: σ.
      key: used for nothing else; as secret as the data.

    Raises:
      TypeError: lookups that are no integers, a key that is none.
      ValueError: a multiplier that is negative or not finite; a threshold that noise alone exceeds
        for more rows than `capacity`, or no row exceeds.

    Source: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
    Models", 2023 (DP-FEST), with a threshold in place of a top k.

    >>> lookups = jnp.arange(3000) % 3  # three rows, by a thousand examples each
    >>> selection = RowSelection(table_size=10**6, capacity=10, threshold=500.0)
    >>> found = select_rows(
    ...     lookups, selection=selection, noise_multiplier=20.0, key=jax.random.key(0)
    ... )
    >>> found.rows
    array([0, 1, 2], dtype=int32)
    """
    # Not at the top: it imports dp_accounting, which `selected_grad` has no use for.
    from dpoptax._pricing.events import noisy_sum_event

    if not isinstance(selection, RowSelection):
        raise TypeError(f"selection={selection!r}: want a dpoptax.tables.RowSelection(...)")
    noise_multiplier, _ = check_mechanism(noise_multiplier, 1)
    key, lookups = check_key(key), jnp.asarray(lookups)
    which = jnp.ones(lookups.shape[0], bool) if mask is None else jnp.asarray(mask).astype(bool)
    if which.shape != lookups.shape[:1]:
        raise ValueError(f"mask has shape {which.shape}: want ({lookups.shape[0]},)")

    @jax.jit
    def selected(lookups: jax.Array, mask: jax.Array, key: jax.Array) -> tuple[jax.Array, ...]:
        return draw_rows(count_rows(lookups, mask, selection), selection, noise_multiplier, key)

    rows, number = map(np.asarray, selected(lookups, which, key))
    rows = rows[rows < selection.table_size]
    if not rows.size:
        raise ValueError(
            f"threshold={selection.threshold}: no row was selected, and what was tried is a "
            "release that counts; lower the threshold"
        )
    event = noisy_sum_event(noise_multiplier, 1, lambda gaussian: gaussian)
    return Vocabulary(rows, int(number), event)
