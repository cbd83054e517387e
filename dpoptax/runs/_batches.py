"""Batches of a plan: rows of checked data, gathered one step ahead."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding

from dpoptax._support.tree import PyTree

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler
    from dpoptax.users import UserTable

T = TypeVar("T")
Drawn: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


class Batch(NamedTuple):
    """Holds the batch of one step. All fields except `step` are private or secret.

    Attributes:
      step: the number of the step, from 0.
      examples: the drawn rows of the data, leaves (padded_size, …). For users, the pair of their
        records, leaves (padded_size, records_per_user, …), and the mask of these records.
      mask: (padded_size,) bool, False for padding. With a sharding, there may be more padding.
      ids: (padded_size,) int64, the numbers of the rows in the data, or of the users. Pass them to
        `clipped_grad` for a loss with randomness.
    """

    step: int
    examples: PyTree
    mask: np.ndarray
    ids: np.ndarray


def check_rows(
    data: PyTree,
    sampler: "Sampler",
    users: "UserTable | None",
    *,
    sources: bool = False,
) -> None:
    """Raises an error unless every column of the data has a row for each record.

    JAX clamps indices beyond the end. With fewer rows than N, the last row would then fill all
    places of the missing ones, and move the sum by as many clipping bounds.

    Args:
      data: the columns.
      sampler: draws records, or users.
      users: the records of the users.
      sources: whether a column may also be a list or another sequence of records.

    Raises:
      TypeError: a column has no rows.
      ValueError: `data` has another number of rows, or `users` is missing or not expected.
    """
    if (sampler.unit == "user") != (users is not None):
        raise ValueError(
            "`users` must be the table that made the sampler of the plan, or None if the plan "
            f"draws examples, got {users!r} for a plan that draws {sampler.unit}s."
        )
    size, row = sampler.dataset_size, "example of the plan"
    if users is not None:
        size, row = users.num_records, "record of `users`"
    # A list of records is one column, not a tree of columns.
    is_list = (lambda node: isinstance(node, list)) if sources else None
    columns = jax.tree_util.tree_leaves_with_path(data, is_leaf=is_list)
    if not columns:
        raise ValueError(f"`data` must hold arrays with {size:,} rows, got {data!r}.")
    for path, column in columns:
        name = f"data{jax.tree_util.keystr(path)}"
        shape = () if isinstance(column, str) else getattr(column, "shape", None)
        if not shape and not (sources and shape is None and hasattr(column, "__getitem__")):
            raise TypeError(
                f"`{name}` must be an array with a row for each example, got a "
                f"{type(column).__name__} without rows. Convert lists with np.asarray."
            )
        if len(column) != size:
            remedy = "Make the plan with the number of rows that are left after filters."
            if isinstance(column, list):
                remedy = "A list holds examples: pass several arrays as a tuple or dict."
            raise ValueError(
                f"`{name}` must have {size:,} rows, one for each {row}, got {len(column):,}. "
                f"{remedy}"
            )


def draw(sampler: "Sampler", users: "UserTable | None", step: int) -> Drawn:
    """Returns the rows that a step draws from the data, the mask, the ids, and `known`.

    Rows are (B,), or (B, R) for the records of users, and `known` is the mask of these records.
    """
    if users is None:
        # Records are their own ids.
        rows, mask = sampler.sample(step)
        return rows, mask, rows, None
    drawn = users.sample(sampler, step)
    return drawn.records, drawn.mask, drawn.users, drawn.records_mask


def read_batch(
    read: Callable[[np.ndarray], PyTree], drawn: Drawn, sharding: NamedSharding | None
) -> tuple[PyTree, Any, Any]:
    """Returns the examples of a `Batch`, its mask and its ids; see `read_sharded`."""
    rows, *others = drawn
    examples, (mask, ids, known) = read_sharded(read, rows, others, sharding)
    return examples if known is None else (examples, known), mask, ids


def read_sharded(
    read: Callable[[np.ndarray], PyTree],
    indices: np.ndarray,
    others: PyTree,
    sharding: NamedSharding | None,
) -> tuple[Any, Any]:
    """Reads the rows of a batch that this host's devices need, and places them.

    Every host calls it with the same indices. The result is one array over all hosts.

    Args:
      read: returns the records at some of the indices, as leaves with these leading axes.
      indices: indices of records, (B,), or of the records of users, (B, R).
      others: NumPy arrays with a row for each row of `indices`, such as the mask. They and the
        indices are padded with zeros, so that every device gets the same number of rows.
      sharding: the sharding of the leading axis; None reads all rows and places nothing.

    Returns:
      The records and the other arrays.
    """
    if sharding is None:
        return read(indices), others
    indices, others = jax.tree.map(lambda rows: _padded(rows, sharding), (indices, others))
    size = len(indices)
    parts = sharding.addressable_devices_indices_map((size,)).values()
    # Several devices may hold the same rows.
    bounds = sorted({part[0].indices(size)[:2] for part in parts if part is not None})
    local = np.concatenate([np.arange(*part) for part in bounds])
    rows = read(indices[local]), jax.tree.map(lambda x: x[local], others)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(
            sharding, np.asarray(x), (size, *x.shape[1:])
        ),
        rows,
    )


def _padded(rows: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """Pads rows with zeros, so that every shard has the same number of rows."""
    devices = sharding.mesh.size
    # An axis with one row for each device shows how many shards it gets.
    shards = devices // sharding.shard_shape((devices,))[0]
    return np.pad(rows, [(0, -len(rows) % shards)] + [(0, 0)] * (rows.ndim - 1))


def read_ahead(load: Callable[[int], T], steps: Iterable[int]) -> Iterator[T]:
    """Yields `load(step)` for each step in order, computed in a thread one step ahead.

    Args:
      load: returns the batch of a step, or anything else.
      steps: the numbers of the steps.

    >>> list(read_ahead(lambda step: step**2, range(3)))
    [0, 1, 4]
    """
    from concurrent.futures import ThreadPoolExecutor  # `import dpoptax` needs no threads

    pool = ThreadPoolExecutor(1, thread_name_prefix="dpoptax batches")
    exiting = sys.is_finalizing  # modules may be gone when an abandoned iterator ends at exit
    try:
        submitted = (pool.submit(load, step) for step in steps)
        pending = next(submitted, None)
        while pending is not None:
            ahead = next(submitted, None)  # loads while the program uses the pending batch
            yield pending.result()
            pending = ahead
    finally:
        if not exiting():  # Python has ended the thread by then
            pool.shutdown()


def gather(data: PyTree, indices: np.ndarray) -> PyTree:
    """Gathers rows; a memory-mapped column is read from its file."""

    def rows(column: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        found = column[indices]
        return found if isinstance(found, jax.Array) else np.asarray(found)

    return jax.tree.map(rows, data)
