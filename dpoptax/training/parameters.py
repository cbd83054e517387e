"""Saves and loads trees of arrays, such as released parameters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def save_params(path: str | Path, params: Any) -> None:
    """Writes a tree of arrays as a msgpack file of nested dicts, which `load_params` reads.

    The file holds names and arrays only, no code. Items of lists and tuples are named "0", "1", …

    Args:
      path: the file, such as "params.msgpack".
      params: any tree, of a flax, Equinox or Haiku model, such as `FitResult.params`.

    Raises:
      TypeError: a leaf is not an array of numbers. Typed keys, which an optimizer state holds, are
        secret and not saved.
    """
    from flax import serialization, traverse_util

    arrays: Any = {names: _array(names, leaf) for names, leaf in _leaves(params)}
    saved = arrays[()] if () in arrays else traverse_util.unflatten_dict(arrays)
    Path(path).write_bytes(serialization.msgpack_serialize(saved))


def load_params(path: str | Path, like: Any = None) -> Any:
    """Reads a file of `save_params`, such as the params.msgpack of `dpoptax train`.

    Args:
      path: the file.
      like: a tree with the structure and the shapes of the result, such as initial parameters. None
        returns the nested dicts of the file.

    Returns:
      The tree, of NumPy arrays.

    Raises:
      ValueError: `like` has other arrays than the file, or other shapes.

    >>> import tempfile
    >>> params = {"dense": (np.zeros((2, 3)), np.ones(3))}
    >>> path = Path(tempfile.mkdtemp()) / "params.msgpack"
    >>> save_params(path, params)
    >>> load_params(path, params)["dense"][1], list(load_params(path)["dense"])
    (array([1., 1., 1.]), ['0', '1'])
    """
    from flax import serialization

    found = serialization.msgpack_restore(Path(path).read_bytes())
    if like is None:
        return found
    stored = dict(_leaves(found))
    wanted = {names: np.shape(leaf) for names, leaf in _leaves(like)}
    shapes = {names: leaf.shape for names, leaf in stored.items()}
    if shapes != wanted:
        raise ValueError(
            f"`like` must have the arrays and shapes of {path}, {_differing(shapes, wanted)}, got "
            f"{_differing(wanted, shapes)}. Without `like`, nested dicts are returned."
        )
    return jax.tree.unflatten(jax.tree.structure(like), [stored[names] for names in wanted])


def _differing(shapes: dict[Any, Any], others: dict[Any, Any]) -> dict[str, Any]:
    """Returns the shapes that others have not, by the names of the arrays."""
    return {".".join(n): shape for n, shape in shapes.items() if others.get(n) != shape}


def _leaves(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the names on the way to each leaf, and the leaf."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [(tuple(map(_name, path)), leaf) for path, leaf in leaves]


def _name(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def _array(names: tuple[str, ...], leaf: Any) -> np.ndarray:
    if not jnp.issubdtype(getattr(leaf, "dtype", type(leaf)), np.number):
        raise TypeError(
            f"`params` must hold arrays of numbers, got {type(leaf).__name__} at "
            f"{'.'.join(names)!r}. Save the parameters, not the state of the optimizer."
        )
    return np.asarray(jax.device_get(leaf))
