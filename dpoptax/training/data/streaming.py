"""Reads records from arrays, memory-mapped files and random-access sources.

A step reads only the records of its sample. Each host draws the same sample, a function of (seed,
step), and reads only the rows that its devices need.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from dpoptax.runs import LARGEST_NUMBER, sampled_rows
from dpoptax.training.data.rows import check_numbers, read_rows

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

    Records of JAX arrays stay on the device.

    Raises:
        TypeError: A column does not hold numbers.
        ValueError: Records differ in columns or shapes.
    """

    def rows(path: tuple[Any, ...], column: Any) -> Any:
        if isinstance(column, jax.Array):
            return _gathered(column, indices)
        if isinstance(column, np.ndarray):
            return np.asarray(column[indices])
        return read_rows(column, indices, path)

    return jax.tree_util.tree_map_with_path(rows, source, is_leaf=_is_column)


@jax.jit
def _gathered(column: jax.Array, indices: np.ndarray) -> jax.Array:
    return column[indices]


def count_not_finite(source: Source) -> tuple[int, int]:
    """Counts records that are not finite in float32, and refuses larger numbers than 2⁴⁰.

    If the source is neither in memory nor small, only an evenly spaced sample is checked.

    Returns:
        The number of records with NaN, infinity or a number beyond float32, and the number of
        checked records.

    Raises:
        TypeError: A column does not hold numbers.
        ValueError: Records differ in columns or shapes, or a column has a finite number outside of
            the working range.
    """
    arrays = columns(source)
    if all(map(_is_array, arrays)) and (
        in_memory(source) or sum(array.nbytes for array in arrays) <= _CHECKED_BYTES
    ):
        records = source
    else:
        records = read(source, sampled_rows(source_size(source)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(records):
        check_numbers(path, leaf)
    paths_and_leaves = jax.tree_util.tree_leaves_with_path(records)
    finite = np.ones(len(paths_and_leaves[0][1]), bool)
    for path, leaf in paths_and_leaves:
        values = np.asarray(leaf)
        if jax.numpy.issubdtype(values.dtype, np.floating):
            finite &= _check_range(jax.tree_util.keystr(path), values)
    return int(np.count_nonzero(~finite)), len(finite)


def _check_range(column: str, values: np.ndarray) -> np.ndarray:
    """Returns whether records are finite in float32; raises an error if one is 2⁴⁰ or more."""
    values = values.reshape(len(values), -1)
    # Reductions avoid a copy of the values, and both are NaN if any value is.
    with np.errstate(invalid="ignore"):
        least, most = values.min(axis=1, initial=0), values.max(axis=1, initial=0)
    largest = np.maximum(np.float64(most), -np.float64(least))
    finite: np.ndarray = largest <= np.finfo(np.float32).max
    if np.any(finite & (largest >= LARGEST_NUMBER)):
        raise ValueError(
            f"The column {column or 'of the data'} must have numbers below 2⁴⁰ ≈ 1.1e12. Gradients "
            "of larger numbers are outside of the working range of the clip, so these examples "
            "would add zero. Divide the column by a public constant: for example, turn nanoseconds "
            "into days."
        )
    return finite


def chunks(source: Source, size: int) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields all records in order, in padded chunks of `size`, with masks."""
    total = source_size(source)
    for start in range(0, total, size):
        indices = np.arange(start, start + size)
        yield read(source, np.minimum(indices, total - 1)), indices < total
