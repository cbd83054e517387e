"""Rows of a table: looked up by a loss, taken from the table, and put back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpoptax._tree import PyTree
from dpoptax.tables._row_selection import table_rows
from dpoptax.tables._trained_rows import UNSUPPORTED_USE, TrainedRows

# Every number that stands for a row.
_MAX_INDEX = 2**31 - 1


class Located(NamedTuple):
    """Lookups whose place among the trained rows is known; see `locate`.

    Attributes:
      slots: places among the trained rows, int32 (…); their number where a row is not trained.
      frozen: the row of the table for those that are not trained, (…, d); `None` for zeros.
    """

    slots: jax.Array
    frozen: jax.Array | None


def look_up(table: Any, lookups: ArrayLike | Located) -> jax.Array:
    """The rows of a table that are looked up: the same in a loss for training and for evaluation.

    Args:
      table: (V, d), or (k, d) of trained rows, or what `selected_grad` puts in their place.
      lookups: integers (…), of the whole table; or what `locate` made of them.

    Returns:
      (…, d); zeros for numbers outside the table, such as a padding of −1.

    >>> table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    >>> look_up(table, jnp.array([1, -1]))
    Array([[3., 4.],
           [0., 0.]], dtype=float32)
    """
    if not isinstance(lookups, Located):
        if isinstance(table, TrainedRows):
            raise TypeError(UNSUPPORTED_USE)
        table = jnp.asarray(table)
        return take_rows(table, table_rows(jnp.asarray(lookups), table.shape[0]))
    values = table.values if isinstance(table, TrainedRows) else jnp.asarray(table)
    found = take_rows(values, lookups.slots)
    if lookups.frozen is None:
        return found
    trained = (lookups.slots < values.shape[0])[..., None]
    return jnp.where(trained, found, lookups.frozen.astype(found.dtype))


def locate(lookups: ArrayLike, rows: ArrayLike, table: jax.Array | None = None) -> Located:
    """Finds lookups among the rows that are trained, for `look_up` in the loss.

    For rows that are the same in all steps: a public vocabulary, or one from `select_rows`. Their
    values, `take_rows(table, rows)`, are then a parameter like others, for any clip, noise and
    optimizer, and cost what k rows cost. `selected_grad` does this by itself.

    Privacy: a function of each example and of `rows`, which must be public.

    Args:
      lookups: integers (…), the numbers of rows of the whole table.
      rows: (k,), ascending, each once. Behind them may be fillings with V, where a table is given.
      table: (V, d), what to look up for rows that are not trained; it gets no gradient. `None` for
        zeros.

    Raises:
      TypeError: lookups that are no integers.
      ValueError: no rows.

    >>> locate(jnp.array([7, 3, 5]), jnp.array([3, 7])).slots
    Array([1, 0, 2], dtype=int32)
    """
    rows = jnp.asarray(rows)
    if rows.ndim != 1 or not rows.size:
        raise ValueError(f"rows have shape {rows.shape}: want (k,), at least one row to train")
    size = _MAX_INDEX if table is None else table.shape[0]
    wanted = table_rows(jnp.asarray(lookups), size)
    place = jnp.minimum(jnp.searchsorted(rows, wanted), rows.size - 1)
    known = (rows[place] == wanted) & (wanted < size)
    slots = jnp.where(known, place, rows.size).astype(jnp.int32)
    return Located(slots, None if table is None else take_rows(table, wanted))


def take_rows(table: jax.Array, rows: ArrayLike) -> jax.Array:
    """table[rows], (…, d); zeros for numbers from V on. None may be negative.

    >>> take_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, 2])).tolist()
    [[2.0], [0.0]]
    """
    return table.at[jnp.asarray(rows)].get(mode="fill", fill_value=0)


def put_rows(table: jax.Array, rows: ArrayLike, values: jax.Array) -> jax.Array:
    """The table with other values in the given rows; those from V on are left out.

    Where the table is donated it is written in place, in time that does not depend on V.

    >>> put_rows(jnp.zeros((3, 1)), jnp.array([1, 3]), jnp.ones((2, 1))).tolist()
    [[0.0], [1.0], [0.0]]
    """
    return table.at[jnp.asarray(rows)].set(values.astype(table.dtype), mode="drop")


def apply_updates(
    params: PyTree, updates: PyTree, rows: ArrayLike, *, where: Callable[[PyTree], Any]
) -> PyTree:
    """`optax.apply_updates`, with the updates of the table added to the given rows.

    Where the parameters are donated the table is written in place, in time that does not depend on
    V: plain SGD on the table.

    Args:
      params: with the whole table, (V, d).
      updates: with those of the rows, (k, d), in its place.
      rows: (k,); those from V on are left out.
      where: the table in a tree shaped like `params`, such as `lambda p: p["table"]`.

    >>> params = {"table": jnp.zeros((3, 1)), "bias": jnp.zeros(1)}
    >>> updates = {"table": jnp.ones((2, 1)), "bias": jnp.ones(1)}
    >>> params = apply_updates(params, updates, jnp.array([1, 3]), where=lambda p: p["table"])
    >>> params["table"].tolist(), params["bias"].tolist()
    ([[0.0], [1.0], [0.0]], [1.0])
    """
    place, (leaves, structure) = place_of(params, where), jax.tree.flatten(params)
    changes, given = jax.tree.flatten(updates)
    if len({given, structure}) > 1:
        raise ValueError(
            f"updates are {given}, and the parameters {structure}: want updates of all "
            "parameters, those of the rows in the place of the table"
        )
    table, change = leaves[place], changes[place]
    leaves[place] = changes[place] = None
    applied = optax.apply_updates(leaves, changes)
    applied[place] = table.at[jnp.asarray(rows)].add(change.astype(table.dtype), mode="drop")
    return jax.tree.unflatten(structure, applied)


def place_of(params: PyTree, where: Callable[[PyTree], Any]) -> int:
    """The number of the table among the leaves of the parameters."""
    leaves, structure = jax.tree.flatten(params)
    found = where(jax.tree.unflatten(structure, range(len(leaves))))
    if not isinstance(found, int) or leaves[found].ndim != 2:
        raise ValueError(
            f"where(params) is {found!r}: want one table of shape (V, d), as by where=lambda "
            'params: params["table"]'
        )
    return found
