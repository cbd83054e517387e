"""Registers published data sets and specifies the data of a config."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from dpoptax.runs import rows_digest
from dpoptax.training import ConfigError
from dpoptax.training.data.dataset import (
    Dataset,
    DatasetSpec,
    Shapes,
    Split,
    Unit,
    register_dataset,
)
from experiments.data.features import FeatureMap, example_of, featured
from experiments.data.tokens import Tokens

Kind = Literal["images", "sentences", "generation"]
"""An image and its class; a row of tokens and its class; or a row of tokens with a label for each,
the next token or `NO_LABEL`."""


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
        num_classes: Number of classes; 0 for generation.
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
        labels = (length,) if self.kind == "generation" else ()
        example = {"inputs": inputs, "labels": jax.ShapeDtypeStruct(labels, np.int32)}
        return Shapes(self.train_size, example, self.num_classes)


PUBLISHED: dict[str, PublishedDataset] = {}
"""All published data sets by name."""


def register(name: str, dataset: PublishedDataset) -> None:
    """Adds a data set. Plain configs can also use it if it has images."""
    PUBLISHED[name] = dataset
    if dataset.kind == "images":
        register_dataset(dataset.load, name)


@dataclasses.dataclass(frozen=True)
class PublishedSpec(DatasetSpec):
    """Specifies a published data set, or another one with features instead of images.

    Attributes:
        tokens: Settings that turn its texts into arrays.
        features: Map that replaces its images. None: the images themselves.
    """

    tokens: Tokens = Tokens(None, 128)
    features: FeatureMap | None = None

    def load(self) -> Dataset:
        """Reads the data set and computes its features.

        Raises:
            ConfigError: As for `DatasetSpec.load`, or the examples have no such features.
        """
        dataset = super().load()
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
        digests = {"source": rows_digest(dataset.train, whole=False)}
        fields |= {"train": train, "test": test, "computed_from": digests}
        return FeatureDataset(**fields)

    def shapes(self, unit: Unit) -> Shapes:
        """Returns published sizes without a directory, and otherwise those of the data.

        The number of users is known from the data only.
        """
        if self.features is not None:
            self._check_images(self.features)
            images = dataclasses.replace(self, features=None).shapes(unit)
            return images._replace(example=example_of(self.features, images.example))
        if self.data_dir is None and unit == "example" and self.name in PUBLISHED:
            return PUBLISHED[self.name].shapes(self.tokens.length)
        return super().shapes(unit)

    def read(self) -> Dataset:
        """Reads the data set, with texts encoded by the tokenizer."""
        if self._kind == "images":
            return super().read()
        return PUBLISHED[self.name].load(self.directory(), self.tokens)

    @property
    def _kind(self) -> Kind:
        return PUBLISHED[self.name].kind if self.name in PUBLISHED else "images"

    def _check_images(self, features: FeatureMap) -> None:
        if self._kind != "images":
            raise ConfigError(
                f"`features` must be 'none' for dataset={self.name!r}, which is for {self._kind}, "
                f"got {features.name!r}. Features need images."
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
