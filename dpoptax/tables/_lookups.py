"""Lookups, reads and updates of table rows."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from dpoptax._support.tree import PyTree, widen
from dpoptax.tables._row_selection import table_rows

# The largest row number.
_MAX_INDEX = 2**31 - 1

UNSUPPORTED_USE = (
    "The loss must read the table only by `dpoptax.tables.look_up(table, lookups)`. Other uses, "
    "such as tied softmax weights, a norm of the whole table, or ids from elsewhere, have a "
    "gradient in all rows. Train the whole table with `dpoptax.clipped_grad`, use separate "
    "parameters for the other use, or select a vocabulary once with `dpoptax.tables.select_rows`."
)


class Located(NamedTuple):
    """Lookups with their places among the trained rows; see `locate`.

    Attributes:
      slots: places among the trained rows, int32 (…); their number if a row is not trained.
      frozen: the table's values for rows that are not trained, (…, d); `None` for zeros.
    """

    slots: jax.Array
    frozen: jax.Array | None


class TrainedRows:
    """Substitute for the table in the loss of `selected_grad`, only for `look_up`."""

    def __init__(self, values: jax.Array) -> None:
        self.values = values

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(UNSUPPORTED_USE)

    __getitem__ = __len__ = __iter__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __truediv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        """Raises an error for attributes of arrays."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()


def look_up(table: Any, lookups: ArrayLike | Located) -> jax.Array:
    """Returns the looked-up rows of a table, in training and evaluation alike.

    Args:
      table: (V, d), or (k, d) of trained rows, or the object that `selected_grad` passes to a loss.
      lookups: integers (…), row numbers of the whole table, or the result of `locate`.

    Returns:
      (…, d); zeros for numbers outside the table, such as −1 for padding.

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
    """Finds lookups among the trained rows, for `look_up` in the loss.

    Use it if the rows are the same in all steps: a public vocabulary, or one from `select_rows`.
    Their values, `take_rows(table, rows)`, are an ordinary parameter for any clip, noise and
    optimizer, at the cost of k rows. `selected_grad` calls this function itself.

    Privacy: the result depends on each example separately and on `rows`, which must be public.

    Args:
      lookups: integers (…), row numbers of the whole table.
      rows: (k,), ascending and distinct. With a table, they may be padded at the end with V.
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
    wanted = table_rows(jnp.asarray(lookups), size)
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


def apply_updates(
    params: PyTree, updates: PyTree, rows: ArrayLike, *, where: Callable[[PyTree], Any]
) -> PyTree:
    """Adds updates to parameters, with updates of the table only for the given rows.

    This is `optax.apply_updates` with plain SGD on the table. A donated table is written in place,
    in time independent of V.

    Args:
      params: parameters with the whole table, (V, d).
      updates: updates of the same structure, with those of the rows, (k, d), instead of the table.
      rows: (k,); numbers from V on are ignored.
      where: selects the table in a tree shaped like `params`, such as `lambda p: p["table"]`.

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
            f"`updates` must have the structure of the parameters, {structure}, with the updates "
            f"of the rows instead of the table, got {given}."
        )
    table, change = leaves[place], changes[place]
    leaves[place] = changes[place] = None
    applied = optax.apply_updates(leaves, changes)
    applied[place] = table.at[jnp.asarray(rows)].add(change.astype(table.dtype), mode="drop")
    return jax.tree.unflatten(structure, applied)


def rowwise_adagrad(
    table: jax.Array,
    accumulator: jax.Array,
    rows: ArrayLike,
    gradient: jax.Array,
    *,
    learning_rate: ArrayLike,
    eps: float = 1e-8,
) -> tuple[jax.Array, jax.Array]:
    """Computes one step of Adagrad with one accumulator per row, on the given rows.

        a_j ← a_j + mean(g_j²),   table_j ← table_j − η g_j / (√a_j + ε)

    A donated table and accumulator are written in place, in time independent of the number of rows
    of the table. Privacy: post-processing of a release.

    Args:
      table: (V, d).
      accumulator: (V,), float32, initially zeros.
      rows: (k,), distinct; numbers from V on are ignored.
      gradient: (k, d), the release of the noise stage for the rows.
      learning_rate: η.
      eps: ε.

    Returns:
      The table and the accumulator after the step.

    Source: Mudigere et al., "Software-Hardware Co-design for Fast and Scalable Training of Deep
    Learning Recommendation Models", 2022; Duchi et al., 2011.

    >>> table, accumulator = rowwise_adagrad(
    ...     jnp.zeros((3, 2)), jnp.zeros(3), jnp.array([1]), jnp.array([[3.0, -3.0]]),
    ...     learning_rate=0.5,
    ... )
    >>> table.tolist(), accumulator.tolist()
    ([[0.0, 0.0], [-0.5, 0.5], [0.0, 0.0]], [0.0, 9.0, 0.0])
    """
    rows = jnp.asarray(rows)
    gradient = widen(gradient)
    squares = jnp.mean(jnp.square(gradient), axis=-1)
    sums = take_rows(accumulator, rows) + squares
    step = learning_rate * gradient / (jnp.sqrt(sums) + eps)[:, None]
    table = table.at[rows].add(-step.astype(table.dtype), mode="drop")
    return table, accumulator.at[rows].set(sums.astype(accumulator.dtype), mode="drop")


def place_of(params: PyTree, where: Callable[[PyTree], Any]) -> int:
    """Returns the index of the table among the leaves of the parameters."""
    leaves, structure = jax.tree.flatten(params)
    found = where(jax.tree.unflatten(structure, range(len(leaves))))
    if not isinstance(found, int) or leaves[found].ndim != 2:
        raise ValueError(
            f"`where(params)` must be one table of shape (V, d), got {found!r}. Pass for example "
            '`where=lambda params: params["table"]`.'
        )
    return found
