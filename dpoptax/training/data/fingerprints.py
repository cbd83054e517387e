"""Computes digests of arrays and data sets, so that a run detects changed examples."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset, Split

_PART = 2**24
"""Bytes that a thread hashes at once. Digests depend on it."""


def fingerprint(
    dataset: Dataset, key: int | bytes, *, test: bool = False, model: Any = None, frozen: Any = None
) -> str:
    """Computes a keyed hash of the training examples and their owners.

    A resumed run must not repeat a released step on other data: the two releases would have the
    same noise, and their difference would reveal the changed examples. The hash covers all examples
    except those of sources that read one record at a time, of which it covers a sample. For
    features it covers the source data, because other machines may round features differently.

    Privacy: the hash is stored only next to its secret key. Without the key it reveals nothing, and
    anyone with the key can subtract the noise anyway.

    Args:
        dataset: The data set.
        key: Secret number, such as the seed of a run.
        test: Whether to include the test split.
        model: The model, included if it has constants.
        frozen: Constants of the model that affect gradients.
    """
    secret = hashlib.sha256(str(key).encode()).digest()
    found = hashlib.blake2b(key=secret, digest_size=16)
    found.update(repr(dict(dataset.computed_from or source_digests(dataset.train))).encode())
    owners = [] if dataset.owners is None else np.asarray(dataset.owners).astype(str).tolist()
    found.update(repr(owners).encode())
    if test:
        tested = dataset.test
        if dataset.computed_from:
            tested = {"labels": cast(Split, tested)["labels"]}
        found.update(repr(source_digests(tested)).encode())
    if frozen:
        found.update(repr(model).encode())
        found.update(tree_digest(frozen).encode())
    return found.hexdigest()


def source_digests(source: streaming.Source) -> dict[str, str]:
    """Returns the SHA-256 of each column of a source, of all its arrays and lists.

    Of a column that is neither, such as a source of `grain`, a sample of records is read.
    """
    found = {}
    for path, column in jax.tree_util.tree_leaves_with_path(source, is_leaf=_is_list):
        if isinstance(column, np.ndarray | jax.Array):
            digest = array_digest(column)
        else:
            places = range(len(column)) if _is_list(column) else streaming.spread(len(column))
            whole = hashlib.sha256(str(len(column)).encode())
            for place in places:
                for leaf in jax.tree.leaves(column[int(place)]):
                    whole.update(_described(values := _on_host(leaf)))
                    whole.update(_bytes_of(values))
            digest = whole.hexdigest()
        found[jax.tree_util.keystr(path)] = digest
    return found


def tree_digest(tree: Any) -> str:
    """Returns the SHA-256 of the paths, types and values of all arrays of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = [(jax.tree_util.keystr(path), array_digest(leaf)) for path, leaf in leaves]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def array_digest(array: Any) -> str:
    """Returns the SHA-256 of type, shape and all values of an array, equal on all hosts.

    Threads hash parts of it, at about 2 GB a second and core.
    """
    values = _on_host(array)
    whole = hashlib.sha256(_described(values))
    rows = values.reshape(1) if values.ndim == 0 else values
    each = max(1, _PART // max(1, rows[:1].nbytes))
    starts = range(0, len(rows), each)

    def part(start: int) -> bytes:
        return hashlib.sha256(_bytes_of(rows[start : start + each])).digest()

    if len(starts) <= 1:
        parts = list(map(part, starts))
    else:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(part, starts))
    whole.update(b"".join(parts))
    return whole.hexdigest()


def _on_host(array: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(array, "dtype", np.float32), jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        array = multihost_utils.process_allgather(array, tiled=True)
    values = np.asarray(array)
    return values.astype(str) if values.dtype.hasobject else values


def _described(values: np.ndarray) -> bytes:
    return f"{values.dtype}{values.shape}".encode()


def _bytes_of(values: np.ndarray) -> Any:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _is_list(node: Any) -> bool:
    return isinstance(node, list)
