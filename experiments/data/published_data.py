"""Lists published data sets, and reads the data of a config."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

import numpy as np

from dpoptax.training import ConfigError
from dpoptax.training.data.dataset import Dataset, Split, load_digits
from dpoptax.training.errors import unknown_name
from experiments.data.features import FeatureMap, featured
from experiments.data.tokens import Tokens

Kind = Literal["images", "sentences"]
"""An image and its class, or a row of tokens and its class."""


@dataclasses.dataclass(frozen=True)
class FeatureDataset(Dataset):
    """A data set of features, which may be memory-mapped. They fit in memory."""

    def _part_of_train(self, which: np.ndarray) -> Split:
        train = cast(Split, self.train)
        return {name: np.asarray(values[which]) for name, values in train.items()}


@dataclasses.dataclass(frozen=True)
class PublishedDataset:
    """A published data set.

    Attributes:
        load: Reads it from a directory; texts also need `Tokens`.
        find: Raises `formats.MissingFilesError` if a directory lacks a file; reads none.
        train_size: Number of training examples.
        num_classes: Number of classes.
        input_shape: Shape of one image.
        kind: Kind of its examples.
    """

    load: Callable[..., Dataset]
    find: Callable[[Path], object]
    train_size: int
    num_classes: int
    input_shape: tuple[int, ...] = ()
    kind: Kind = "images"


PUBLISHED: dict[str, PublishedDataset] = {}
"""All published data sets by name."""


@dataclasses.dataclass(frozen=True)
class PublishedSpec:
    """Specifies a published data set or the digits. It is hashable, so that data are read once.

    Attributes:
        name: Name of the data set.
        data_dir: Directory with its files.
        tokens: Settings that turn its texts into arrays.
        features: Map that replaces its images. None: the images themselves.
    """

    name: str
    data_dir: Path | None = None
    tokens: Tokens = Tokens(None, 128)
    features: FeatureMap | None = None

    def load(self) -> Dataset:
        """Reads the data set and computes its features.

        Raises:
            ConfigError: The name is unknown, the directory or a file is missing, a file is damaged,
                or the examples have no such features.
        """
        self._check_features()
        dataset = self.read()
        if self.features is None:
            return dataset
        train, test = (
            featured(split, self.features, name=f"{self.name}, {which}")
            for which, split in (("train", dataset.train), ("test", dataset.test))
        )
        given = {field.name: getattr(dataset, field.name) for field in dataclasses.fields(Dataset)}
        return FeatureDataset(**{**given, "train": train, "test": test})

    def zeros(self) -> Dataset:
        """Returns zeros of the published size, which take no memory.

        Raises:
            ConfigError: The examples have no such features.
        """
        self._check_features()
        published = PUBLISHED[self.name]
        shape, dtype = published.input_shape, "float32"
        if published.kind != "images":
            shape, dtype = (self.tokens.length,), "int32"
        elif self.features is not None:
            shape, dtype = self.features.shape(shape), "float16"
        rows = {
            name: np.broadcast_to(np.zeros((), of), (published.train_size, *one))
            for name, one, of in (("inputs", shape, dtype), ("labels", (), "int32"))
        }
        return Dataset(self.name, rows, rows, published.num_classes)

    def read(self) -> Dataset:
        """Reads the data set, with texts encoded by the tokenizer."""
        if self.name == "digits":
            return load_digits()
        if self.name not in PUBLISHED:
            raise unknown_name("dataset", self.name, ("digits", *PUBLISHED))
        if self.data_dir is None:
            raise ConfigError(
                f"`data_dir` must be given for dataset={self.name!r}, got None. Pass --data-dir, "
                "the directory with the published files."
            )
        if not self.data_dir.is_dir():
            raise ConfigError(
                f"`data_dir` must be an existing directory, got {str(self.data_dir)!r}."
            )
        published = PUBLISHED[self.name]
        tokens = () if published.kind == "images" else (self.tokens,)
        return published.load(self.data_dir, *tokens)

    def _check_features(self) -> None:
        kind = PUBLISHED[self.name].kind if self.name in PUBLISHED else "images"
        if self.features is not None and kind != "images":
            raise ConfigError(
                f"`features` must be 'none' for dataset={self.name!r}, which is for {kind}, got "
                f"{self.features.name!r}. Features need images."
            )
