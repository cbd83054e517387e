"""Keyed hashes of data sets, by which a run notices that its examples have changed."""

import hashlib
from typing import Any, cast

import jax
import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset, Split


def fingerprint(
    dataset: Dataset, key: int | bytes, *, test: bool = False, model: Any = None, frozen: Any = None
) -> str:
    """Computes a hash of the training examples and of their owners.

    It covers all examples that are in memory, so that one replaced example changes it: between a
    step that was shown and the same step run again, that example would be the only difference, and
    no noise would hide it. It covers a spread of streamed examples. For features it covers the data
    that they were computed from, because another machine may round features differently.

    Privacy: the hash is stored next to its key only, and the key is secret. Without the key it
    reveals nothing. With the key the noise can be subtracted anyway.

    Args:
        dataset: The data set.
        key: Secret number, such as the seed of a run.
        test: Whether to cover the test split too.
        model: The model, covered if it has constants.
        frozen: Constants of the model, on which gradients depend. A spread of each is covered.
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
