"""Stacks the records of a data set, and names the column that does not fit."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Path: TypeAlias = tuple[Any, ...]

_RAGGED = "a ragged list"


def read_rows(column: Sequence[Any], indices: np.ndarray, path: Path = ()) -> Any:
    """Reads the records at `indices` and stacks them to leaves (*indices.shape, ...).

    A list of numbers of one type in a record, as in JSON, is an array.

    Args:
        column: The records.
        indices: Indices of records.
        path: The place of the column in the source, for messages.

    Raises:
        TypeError: A column has no records at integer indices, or does not hold numbers.
        ValueError: A record has other columns or shapes than the first.
    """

    def stack(place: Path, *leaves: Any) -> np.ndarray:
        stacked = np.stack(leaves).reshape(*indices.shape, *np.shape(leaves[0]))
        check_numbers((*path, *place), stacked)
        return stacked

    try:
        records = [column[int(index)] for index in indices.flat]
    except KeyError as error:
        raise TypeError(
            f"{_name(path)} must have a row at each integer index, got a {type(column).__name__}. "
            "Pass a dict of arrays, such as `{name: frame[name].to_numpy() for name in frame}`."
        ) from error
    try:
        arrays = [jax.tree.map(_as_array, each, is_leaf=_is_numeric_list) for each in records]
        return jax.tree_util.tree_map_with_path(stack, *arrays)
    except (TypeError, ValueError) as error:
        if text := _describe_misfit(records, indices.ravel(), path):
            raise ValueError(text) from error
        raise


def check_numbers(path: Path, column: Any) -> None:
    """Raises a TypeError if an array does not hold numbers."""
    kind = column.dtype
    if isinstance(column, jax.Array) or jnp.issubdtype(kind, np.number) or kind == np.bool_:
        return
    got, remedy = f"dtype {kind}", "encode its values as numbers, such as tokens or classes"
    if kind == np.object_:
        got, remedy = "Python objects", "convert it with `np.stack`, with rows of one length"
    raise TypeError(f"{_name(path)} must hold numbers, got {got}. Remove it, or {remedy}.")


def _is_numeric_list(node: Any) -> bool:
    if not isinstance(node, list):
        return False
    kinds = set(map(type, node))
    if kinds == {list}:
        return all(map(_is_numeric_list, node))
    return len(kinds) <= 1 and all(issubclass(kind, int | float | np.number) for kind in kinds)


def _as_array(node: Any) -> Any:
    return np.asarray(node) if isinstance(node, list) else node


def _describe_misfit(records: Sequence[Any], indices: np.ndarray, path: Path) -> str:
    """Describes the first record that does not fit the first one; empty if all fit."""
    first = _shapes(records[0])
    for index, record in zip(indices, records, strict=True):
        found = _shapes(record)
        for place in first | found:
            a, b = first.get(place, "nothing"), found.get(place, "nothing")
            if a != b or a == _RAGGED:
                return (
                    f"{_name((*path, *place))} must have the same shape in all rows, got {a} in "
                    f"row {indices[0]} and {b} in row {index}. Pad or cut the rows to one length, "
                    "and ignore the padding in the loss. Replace missing values by a rule that "
                    "looks at one example at a time, or remove the column."
                )
    return ""


def _shapes(record: Any) -> dict[Path, str]:
    """Returns the shape of each leaf of a record, by its path."""

    def shape(leaf: Any) -> str:
        try:
            return "None" if leaf is None else str(np.shape(leaf))
        except ValueError:
            return _RAGGED

    leaves = jax.tree_util.tree_leaves_with_path(
        record, is_leaf=lambda node: node is None or _is_numeric_list(node)
    )
    return {tuple(path): shape(leaf) for path, leaf in leaves}


def _name(path: Path) -> str:
    return f"Column {jax.tree_util.keystr(path)}" if path else "The column of `data`"
