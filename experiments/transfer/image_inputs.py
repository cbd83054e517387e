"""Computes the inputs of private training from images: activations of a frozen network."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dpoptax.training import Dataset
from experiments.data.features import featured
from experiments.data.network_features import NetworkFeatures, PooledFeatures

_PART = 10_000  # images whose activations are one file of the cache


class ImageProblem(NamedTuple):
    """Images as features of a frozen network.

    Attributes:
        train: "inputs" and "labels" of the training images.
        test: Those of the held-out images.
        classes: Number of classes.
    """

    train: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    classes: int

    def hold_out(self, share: float) -> "ImageProblem":
        """Returns the problem with a random share of the training images as held-out images."""
        count = len(self.train["labels"])
        order = np.random.default_rng(0).permutation(count)
        out, kept = np.split(order, [round(share * count)])
        train, test = (
            {name: column[np.sort(rows)] for name, column in self.train.items()}
            for rows in (kept, out)
        )
        return self._replace(train=train, test=test)


def load_activations(data: Dataset, dataset: str, wanted: NetworkFeatures) -> ImageProblem:
    """Returns the activations of all images, from the cache of features where it has them.

    Each 10,000 images have their own file, so that an interrupted computation continues.
    """
    splits = []
    for name, split in (("train", data.train), ("test", data.test)):
        assert isinstance(split, Mapping)
        parts = [
            featured(
                {column: values[start : start + _PART] for column, values in split.items()},
                wanted,
                name=f"{dataset}, {name} {start}",
            )["inputs"]
            for start in range(0, len(split["labels"]), _PART)
        ]
        splits.append({"inputs": np.concatenate(parts), "labels": split["labels"]})
    assert data.num_classes is not None
    train, test = splits
    return ImageProblem(train, test, data.num_classes)


def pool(problem: ImageProblem, wanted: PooledFeatures) -> ImageProblem:
    """Returns the problem with features of the network's last layer instead of activations."""
    train, test = (
        featured(split, wanted, name=f"last layer, {name}")
        for name, split in (("train", problem.train), ("test", problem.test))
    )
    return problem._replace(train=dict(train), test=dict(test))
