"""Defines data sets with a train and a test split, and loads the digits."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import cast

import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.errors import ConfigError

Split = dict[str, np.ndarray]
"""`{"inputs": (N, ...), "labels": (N, ...)}`: the leading axis counts examples."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set for classification of examples or tokens.

    Attributes:
        name: Its name in tables.
        train: The private examples, arrays as in `Split` or records with the same names. They may
            be larger than memory, because a step reads only its batch.
        test: Held-out examples. They are assumed to be public, so metrics on them cost no privacy.
        num_classes: Number of classes; labels are 0, ..., num_classes - 1. It is 0 for labels
            (N, L) with a label for each token.
        mixed: Whether the order is random, so that every fifth example is a fair sample.
        owners: Owner of each training example, (N,), numbers or texts. None if unknown.

    Raises:
        ConfigError: Columns differ in length, or labels are out of range.
    """

    name: str
    train: streaming.Source
    test: streaming.Source
    num_classes: int
    mixed: bool = False
    owners: np.ndarray | None = None

    def __post_init__(self) -> None:
        for which in ("train", "test"):
            if isinstance(split := getattr(self, which), Mapping):
                _check_split(f"The {which} split of the data {self.name}", split, self.num_classes)

    @property
    def train_size(self) -> int:
        """Number of training examples."""
        return streaming.source_size(self.train)

    def for_selection(self) -> "Dataset":
        """Returns the training split with one of every five examples as test split.

        Choices such as a learning rate then do not use the real test split. A fixed random draw
        selects the example, because classes may alternate in a file. The draw depends only on the
        position. If the data set is `mixed`, the last example is selected. A user may own examples
        of both parts.
        """
        firsts = 5 * np.arange(self.train_size // 5)
        drawn = np.random.default_rng(0).integers(5, size=len(firsts))
        held_out = np.zeros(self.train_size, bool)
        held_out[firsts + (4 if self.mixed else drawn)] = True
        return dataclasses.replace(
            self,
            train=self._part_of_train(~held_out),
            test=self._part_of_train(held_out),
            owners=None if self.owners is None else np.asarray(self.owners)[~held_out],
        )

    def _part_of_train(self, which: np.ndarray) -> Split:
        if not streaming.in_memory(self.train):
            raise ConfigError(
                f"The data {self.name} must be in memory to hold out a part of them, got a source "
                "that is streamed. Hold out a part yourself."
            )
        return {name: values[which] for name, values in cast(Split, self.train).items()}


def _check_split(which: str, split: Mapping[str, np.ndarray], num_classes: int) -> None:
    """Raises a ConfigError if columns are missing or differ in length, or labels are wrong."""
    if not {"inputs", "labels"} <= split.keys():
        raise ConfigError(
            f"{which} must have columns 'inputs' and 'labels', got "
            f"{', '.join(map(repr, split)) or 'none'}."
        )
    for key, values in split.items():
        size = len(values)
        if not hasattr(values, "dtype") or not size or size != streaming.source_size(split):
            raise ConfigError(
                f"The columns of {which[0].lower()}{which[1:]} must be equally long arrays with a "
                f"row for each example, got a {type(values).__name__} of length {size} for {key!r}."
            )
    labels = split["labels"]
    if num_classes == 0 and len(labels.shape) == 2:
        return
    if len(labels.shape) != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise ConfigError(
            f"{which} must have integer labels of shape (N,), got {labels.dtype} of shape "
            f"{labels.shape}. Pass the class of each example."
        )
    least, most = int(np.min(labels[:])), int(np.max(labels[:]))
    if least < 0 or most >= num_classes:
        raise ConfigError(
            f"{which} must have labels from 0 to {num_classes - 1}, got {least} to {most}. Correct "
            f"the labels or num_classes={num_classes}."
        )


@functools.cache
def load_digits(*, held_out: bool = False) -> Dataset:
    """Loads the handwritten digits of scikit-learn, 8x8 gray values in [0, 1].

    There are 1438 images for training and 359 for testing. Every fifth image is for testing, so
    that both splits have all writers. The values are divided by 16, a constant of the format.

    Args:
        held_out: Whether a fifth of the training split replaces the test split.
    """
    if held_out:
        return load_digits().for_selection()
    import sklearn.datasets  # imported late, because it takes a second

    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    inputs = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    examples = {"inputs": inputs, "labels": labels.astype(np.int32)}
    return Dataset("digits", examples, examples, 10, mixed=True).for_selection()
