"""Computes keyed hashes of data sets, so that a run detects changed examples."""

import hashlib
from typing import Any, cast

import jax
import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset, Split


def fingerprint(
    dataset: Dataset, key: int | bytes, *, test: bool = False, model: Any = None, frozen: Any = None
) -> str:
    """Computes a keyed hash of the training examples and their owners.

    A resumed run must not repeat a released step on other data: the two releases would have the
    same noise, and their difference would reveal the changed examples. The hash covers all examples
    in memory, and a sample of streamed examples. For features it covers the source data, because
    other machines may round features differently.

    Privacy: the hash is stored only next to its secret key. Without the key it reveals nothing, and
    anyone with the key can subtract the noise anyway.

    Args:
        dataset: The data set.
        key: Secret number, such as the seed of a run.
        test: Whether to include the test split.
        model: The model, included if it has constants.
        frozen: Constants of the model that affect gradients. A sample of each is included.
    """
    secret = hashlib.sha256(str(key).encode()).digest()
    found = hashlib.blake2b(key=secret, digest_size=16)
    found.update(repr(dict(dataset.computed_from or streaming.checksums(dataset.train))).encode())
    owners = [] if dataset.owners is None else np.asarray(dataset.owners).astype(str).tolist()
    found.update(repr(owners).encode())
    if test:
        tested = dataset.test
        if dataset.computed_from:
            tested = {"labels": cast(Split, tested)["labels"]}
        found.update(repr(streaming.checksums(tested)).encode())
    if frozen:
        found.update(repr(model).encode())
        for path, leaf in jax.tree_util.tree_leaves_with_path(frozen):
            found.update(jax.tree_util.keystr(path).encode())
            found.update(np.asarray(leaf).ravel()[streaming.spread(leaf.size)].tobytes())
    return found.hexdigest()
