"""Batches of a plan: rows of checked data, gathered one step ahead."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
import numpy as np

from dpoptax._support.tree import PyTree

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler
    from dpoptax.users import UserTable

T = TypeVar("T")


class Batch(NamedTuple):
    """Holds the batch of one step. All fields except `step` are private or secret.

    Attributes:
      step: the number of the step, from 0.
      examples: the drawn rows of the data, leaves (padded_size, …). For users, the pair of their
        records, leaves (padded_size, records_per_user, …), and the mask of these records.
      mask: (padded_size,) bool, False for padding.
      ids: (padded_size,) int64, the numbers of the rows in the data, or of the users. Pass them to
        `clipped_grad` for a loss with randomness.
    """

    step: int
    examples: PyTree
    mask: np.ndarray
    ids: np.ndarray


def check_rows(data: PyTree, size: int, unit: str) -> None:
    """Raises an error unless every leaf of the data has `size` rows.

    JAX clamps indices beyond the end. With fewer rows than N, the last row would then fill all
    places of the missing ones, and move the sum by as many clipping bounds.
    """
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise ValueError(f"`data` must hold arrays with {size:,} rows, got {data!r}.")
    for path, leaf in leaves:
        name = f"data{jax.tree_util.keystr(path)}"
        shape = getattr(leaf, "shape", ())
        if not shape:
            raise TypeError(
                f"`{name}` must be an array with a row for each example, got a "
                f"{type(leaf).__name__} without rows. Convert lists with np.asarray."
            )
        if shape[0] != size:
            raise ValueError(
                f"`{name}` must have {size:,} rows, one for each {unit} of the plan, got "
                f"{shape[0]:,}. Make the plan with the number of rows that are left after filters."
            )


def example_loader(
    data: PyTree, sampler: "Sampler", users: "UserTable | None"
) -> Callable[[int], Batch]:
    """Returns a function that draws and gathers the batch of a step.

    Raises:
      TypeError: a leaf of `data` is not an array with rows.
      ValueError: `data` has another number of rows, or `users` is missing or not expected.
    """
    if (sampler.unit == "user") != (users is not None):
        raise ValueError(
            "`users` must be the table that made the sampler of the plan, or None if the plan "
            f"draws examples, got {users!r} for a plan that draws {sampler.unit}s."
        )
    if users is None:
        check_rows(data, sampler.dataset_size, "example")
    else:
        check_rows(data, users.num_records, "record of `users`, or example")

    def load(step: int) -> Batch:
        if users is None:
            indices, mask = sampler.sample(step)
            return Batch(step, _rows(data, indices), mask, indices)
        drawn = users.sample(sampler, step)
        examples = _rows(data, drawn.records), drawn.records_mask
        return Batch(step, examples, drawn.mask, drawn.users)

    return load


def read_ahead(load: Callable[[int], T], steps: Iterable[int]) -> Iterator[T]:
    """Yields `load(step)` for each step in order, computed in a thread one step ahead."""
    from concurrent.futures import ThreadPoolExecutor  # `import dpoptax` needs no threads

    with ThreadPoolExecutor(1, thread_name_prefix="dpoptax batches") as pool:
        pending = None
        for step in steps:
            ahead = pool.submit(load, step)
            if pending is not None:
                yield pending.result()
            pending = ahead
        if pending is not None:
            yield pending.result()


def _rows(data: PyTree, indices: np.ndarray) -> PyTree:
    """Gathers rows; a memory-mapped column is read from its file."""

    def rows(column: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        found = column[indices]
        return found if isinstance(found, jax.Array) else np.asarray(found)

    return jax.tree.map(rows, data)
