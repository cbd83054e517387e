"""Lists published data sets, and reads the data of a config."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np

from dpoptax.training import ConfigError
from dpoptax.training.data.dataset import Dataset, Split, load_digits
from dpoptax.training.errors import unknown_name
from experiments.data.features import FeatureMap, example_of, featured
from experiments.data.tokens import Tokens

Kind = Literal["images", "sentences"]
"""An image and its class, or a row of tokens and its class."""


class Shapes(NamedTuple):
    """Sizes and types of a data set, without its values.

    Attributes:
        size: Number of training examples.
        example: Shapes and types of one example.
        num_classes: As for `Dataset`.
    """

    size: int
    example: dict[str, jax.ShapeDtypeStruct]
    num_classes: int


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
        train_size: Number of training examples.
        input_shape: Shape of one image.
        num_classes: Number of classes.
        kind: Kind of its examples.
        find: Raises `formats.MissingFilesError` if a directory lacks a file; reads none.
    """

    load: Callable[..., Dataset]
    train_size: int
    input_shape: tuple[int, ...] = ()
    num_classes: int = 0
    kind: Kind = "images"
    find: Callable[[Path], object] = lambda data_dir: None

    def shapes(self, length: int = 0) -> Shapes:
        """Returns its sizes, with examples of `length` tokens if it has texts."""
        if self.kind == "images":
            inputs = jax.ShapeDtypeStruct(self.input_shape, np.float32)
        else:
            inputs = jax.ShapeDtypeStruct((length,), np.int32)
        example = {"inputs": inputs, "labels": jax.ShapeDtypeStruct((), np.int32)}
        return Shapes(self.train_size, example, self.num_classes)


PUBLISHED: dict[str, PublishedDataset] = {}
"""All published data sets by name."""


@dataclasses.dataclass(frozen=True)
class PublishedSpec:
    """Specifies a published data set or the digits. It is hashable, so that data are read once.

    Attributes:
        name: Name of the data set.
        data_dir: Directory with its files.
        progress: Whether to show a progress bar if reading takes long.
        tokens: Settings that turn its texts into arrays.
        features: Map that replaces its images. None: the images themselves.
    """

    name: str
    data_dir: Path | None = None
    progress: bool = dataclasses.field(default=False, compare=False)
    tokens: Tokens = Tokens(None, 128)
    features: FeatureMap | None = None

    def load(self) -> Dataset:
        """Reads the data set and computes its features.

        Raises:
            ConfigError: The name is unknown, the directory or a file is missing, a file is damaged,
                or the examples have no such features.
        """
        dataset = self.read()
        if self.features is None:
            return dataset
        self._check_images(self.features)
        train, test = (
            featured(split, self.features, name=f"{self.name}, {which}", progress=self.progress)
            for which, split in (("train", dataset.train), ("test", dataset.test))
        )
        fields: dict[str, Any] = {
            field.name: getattr(dataset, field.name) for field in dataclasses.fields(Dataset)
        }
        return FeatureDataset(**{**fields, "train": train, "test": test})

    def shapes(self) -> Shapes:
        """Returns published sizes without a directory, and otherwise those of the data."""
        if self.features is not None:
            self._check_images(self.features)
            images = dataclasses.replace(self, features=None).shapes()
            return images._replace(example=example_of(self.features, images.example))
        if self.data_dir is None and self.name in PUBLISHED:
            return PUBLISHED[self.name].shapes(self.tokens.length)
        data = self.load()
        example = {
            name: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
            for name, values in cast(Split, data.train).items()
        }
        return Shapes(data.train_size, example, data.num_classes)

    def _directory(self) -> Path:
        """Returns the directory of the files, or raises a ConfigError."""
        if self.data_dir is None:
            raise ConfigError(
                f"`data_dir` must be given for dataset={self.name!r}, got None. Pass --data-dir, "
                "the directory with the published files."
            )
        directory = Path(self.data_dir)
        if not directory.is_dir():
            raise ConfigError(f"`data_dir` must be an existing directory, got {str(directory)!r}.")
        return directory

    def read(self) -> Dataset:
        """Reads the data set, with texts encoded by the tokenizer."""
        if self.name == "digits":
            return load_digits()
        if self.name not in PUBLISHED:
            raise unknown_name("dataset", self.name, ("digits", *PUBLISHED))
        published = PUBLISHED[self.name]
        tokens = () if published.kind == "images" else (self.tokens,)
        return published.load(self._directory(), *tokens)

    def _check_images(self, features: FeatureMap) -> None:
        kind = PUBLISHED[self.name].kind if self.name in PUBLISHED else "images"
        if kind != "images":
            raise ConfigError(
                f"`features` must be 'none' for dataset={self.name!r}, which is for {kind}, got "
                f"{features.name!r}. Features need images."
            )


def load_published(
    name: str,
    data_dir: str | Path | None = None,
    tokens: Tokens = Tokens(None, 128),  # noqa: B008
    features: FeatureMap | None = None,
    *,
    progress: bool = False,
) -> Dataset:
    """Reads a data set; see `PublishedSpec`."""
    directory = None if data_dir is None else Path(data_dir)
    return PublishedSpec(name, directory, progress, tokens, features).load()
