"""Identifies the examples of a data set, so that a run detects changed ones."""

from typing import cast

import numpy as np

from dpoptax.runs import Hidden, digest_of, rows_digest
from dpoptax.training.data.dataset import Dataset, Split


def identity_of(dataset: Dataset, *, test: bool = False) -> dict[str, Hidden]:
    """Returns digests of the training examples and their owners, for a `RunIdentity`.

    A digest covers all examples except those of sources that read one record at a time, of which it
    covers a sample. For features it covers the source data, because other machines may round
    features differently.

    Args:
        dataset: The data set.
        test: Whether to include the test split.
    """
    computed = dict(dataset.computed_from)
    train = digest_of(computed) if computed else rows_digest(dataset.train, whole=False)
    owners = [] if dataset.owners is None else np.asarray(dataset.owners).astype(str).tolist()
    found = {
        "The training examples": Hidden(train),
        "The owners of examples": Hidden(digest_of(owners)),
    }
    if test:
        tested = {"labels": cast(Split, dataset.test)["labels"]} if computed else dataset.test
        found["The test examples"] = Hidden(rows_digest(tested, whole=False))
    return found
