"""Reads records from arrays, memory-mapped files and random-access sources.

A step reads only the records of its sample. Each host draws the same sample, a function of (seed,
step), and reads only the rows that its devices need.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dpoptax.training.data.rows import check_numbers, read_rows

# Number of records that identify a streamed source.
_COMPARED = 64
# Memory-mapped sources up to this number of bytes are checked completely.
_CHECKED_BYTES = 2**28


Source = Any
"""A tree of columns with a row for each record. A column is an array, in memory or memory-mapped,
or an object with a length and records at integer indices, such as a list or a source of `grain`."""


def _is_column(node: Any) -> bool:
    return isinstance(node, list)  # a list holds records; tuples and dicts hold columns


def columns(source: Source) -> list[Any]:
    """Returns the columns of a source."""
    return jax.tree.leaves(source, is_leaf=_is_column)


def source_size(source: Source) -> int:
    """Returns the number of records of a source."""
    return len(columns(source)[0])


def in_memory(source: Source) -> bool:
    """Returns whether all columns are arrays that are not memory-mapped."""
    return all(
        _is_array(column) and not isinstance(column, np.memmap) for column in columns(source)
    )


def _is_array(column: Any) -> bool:
    return isinstance(column, np.ndarray | jax.Array)


def read(source: Source, indices: np.ndarray) -> Any:
    """Reads the records at `indices` and stacks them to leaves (*indices.shape, ...).

    Raises:
        TypeError: A column does not hold numbers.
        ValueError: Records differ in columns or shapes.
    """

    def rows(path: tuple[Any, ...], column: Any) -> Any:
        if _is_array(column):
            return np.asarray(column[indices])
        return read_rows(column, indices, path)

    return jax.tree_util.tree_map_with_path(rows, source, is_leaf=_is_column)


def spread(size: int) -> np.ndarray:
    """Returns evenly spaced indices below `size`, including the first and the last."""
    return np.unique(np.linspace(0, size - 1, _COMPARED).astype(np.int64))


def count_not_finite(source: Source) -> tuple[int, int]:
    """Counts records that are not finite in float32.

    If the source is neither in memory nor small, only an evenly spaced sample is checked.

    Returns:
        The number of records with NaN, infinity or a larger number, and the number of checked
        records.

    Raises:
        TypeError: A column does not hold numbers.
        ValueError: Records differ in columns or shapes.
    """
    arrays = columns(source)
    if all(map(_is_array, arrays)) and (
        in_memory(source) or sum(array.nbytes for array in arrays) <= _CHECKED_BYTES
    ):
        records = source
    else:
        records = read(source, spread(source_size(source)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(records):
        check_numbers(path, leaf)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(records)]
    most = np.finfo(np.float32).max
    finite = np.ones(len(leaves[0]), bool)
    for leaf in leaves:
        if jax.numpy.issubdtype(leaf.dtype, np.floating):
            values = leaf.reshape(len(leaf), -1)
            # Reductions avoid a copy of the values, and both are NaN if any value is.
            with np.errstate(invalid="ignore"):
                least, largest = values.min(axis=1, initial=0), values.max(axis=1, initial=0)
            finite &= (-most <= least) & (largest <= most)
    return int(np.count_nonzero(~finite)), len(finite)


def chunks(source: Source, size: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields all records in order, in padded chunks of `size`, with masks."""
    total = source_size(source)
    for start in range(0, total, size):
        indices = np.arange(start, start + size)
        yield read(source, np.minimum(indices, total - 1)), indices < total
