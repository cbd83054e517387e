"""Data sets by name: a train and a test split, each a dict of equally long arrays."""

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from dpoptax.training import streaming
from dpoptax.training.errors import ConfigError, unknown_name

Split = dict[str, np.ndarray]
"""`{"inputs": (N, ...), "labels": (N,)}`: the leading axis counts examples."""

TrainSplit = streaming.Source
"""A split of which a step reads its batch only: arrays as in `Split`, memory-mapped ones, or a
source of records `{"inputs": ..., "labels": ...}`."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A classification data set.

    Attributes:
        name: The name it is registered under.
        train: The private examples; they may be larger than memory.
        test: Held-out examples. They are taken to be public: metrics on them cost no privacy.
        num_classes: Labels are 0, ..., num_classes - 1.
    """

    name: str
    train: TrainSplit
    test: Split
    num_classes: int

    @property
    def train_size(self) -> int:
        """Number of training examples."""
        return streaming.source_size(self.train)

    def for_selection(self, stride: int = 5) -> "Dataset":
        """Training split only: every `stride`-th example becomes the test split.

        What is selected on it, such as a learning rate, has not seen the real test split.
        """
        if not streaming.in_memory(self.train):
            raise ConfigError(
                f"dataset={self.name!r} is streamed: hold out a part of it when you register it"
            )
        train = cast(Split, self.train)
        held_out = np.arange(self.train_size) % stride == stride - 1
        return dataclasses.replace(
            self,
            train={name: values[~held_out] for name, values in train.items()},
            test={name: values[held_out] for name, values in train.items()},
        )


DATASETS: dict[str, Callable[[], Dataset]] = {}


def register_dataset(load: Callable[[], Dataset]) -> Callable[[], Dataset]:
    """Decorator: makes `load` available as a config's `dataset` under its function name."""
    DATASETS[load.__name__] = load
    return load


def load_dataset(name: str) -> Dataset:
    """The data set registered under `name`."""
    if name not in DATASETS:
        raise unknown_name("dataset", name, DATASETS)
    return DATASETS[name]()


@register_dataset
def digits() -> Dataset:
    """Handwritten digits, 8x8 grey values in [0, 1]: 1438 for training, 359 for testing.

    They come with scikit-learn. Every fifth image is for testing, so that both splits have all
    the writers. The scaling by 16, the largest value of the format, reveals nothing of the data.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    whole = Dataset("digits", {"inputs": inputs, "labels": labels.astype(np.int32)}, {}, 10)
    return whole.for_selection()
