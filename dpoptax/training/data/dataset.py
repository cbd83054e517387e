"""Defines data sets, their registry, and the specification of a config's data.

A data set has a train and a test split. A split is a dict of equally long arrays or a source that
reads one record at a time.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.users import UserTable

Unit = Literal["example", "user"]
"""Unit of privacy: a training example, or a user with all of its examples."""

NO_LABEL = -1
"""Label of a token that the loss and the metrics ignore, such as padding."""

Split = dict[str, np.ndarray]
"""`{"inputs": (N, ...), "labels": (N, ...)}`: the leading axis counts examples."""


class Shapes(NamedTuple):
    """Sizes and types of a data set, without its values.

    Attributes:
        units: Number of training examples, or of users if the unit is a user.
        example: Shapes and types of one example.
        num_classes: As for `Dataset`.
    """

    units: int
    example: dict[str, jax.ShapeDtypeStruct]
    num_classes: int | None


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set for classification of examples or tokens, or for a custom loss.

    Attributes:
        name: The registered name.
        train: The private examples, arrays as in `Split` or records with the same names. They may
            be larger than memory, because a step reads only its batch.
        test: Held-out examples. They are assumed to be public, so metrics on them cost no privacy.
        num_classes: Number of classes; labels are 0, ..., num_classes - 1. It is 0 for labels
            (N, L) with a label for each token, and None for a model with its own loss.
        mixed: Whether the order is random, so that every fifth example is a fair sample.
        owners: Owner of each training example, (N,), numbers or texts. None if unknown.
        computed_from: Digests by column of the source data of computed examples. Empty for examples
            that are used as read.
    """

    name: str
    train: streaming.Source
    test: streaming.Source
    num_classes: int | None
    mixed: bool = False
    owners: np.ndarray | None = None
    computed_from: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def train_size(self) -> int:
        """Number of training examples."""
        return streaming.source_size(self.train)

    def users(self, records_per_user: int, *, seed: int) -> UserTable:
        """Returns the table of users, with at most `records_per_user` examples in a step.

        Raises:
            ValueError: The owners are unknown, or an example has no owner.
        """
        return self._table.with_bound(records_per_user, seed=seed)

    @functools.cached_property
    def _table(self) -> UserTable:
        if self.owners is None:
            raise ConfigError(
                f"dataset={self.name!r} must have owners with `records_per_user`, got None. "
                "Register a Dataset with `owners`, or omit `records_per_user`."
            )
        if len(self.owners) != self.train_size:
            raise ConfigError(
                f"dataset={self.name!r} must have one owner for each of its {self.train_size} "
                f"training examples, got {len(self.owners)} owners."
            )
        return UserTable(self.owners, 1, seed=0)

    def units(self, unit: Unit) -> int:
        """Returns the number of training examples, or of users if the unit is a user.

        Raises:
            ValueError: As for `users`.
        """
        return self._table.num_users if unit == "user" else self.train_size

    def user_owners(self, unit: Unit) -> str | None:
        """Returns `UserTable.owners` if the unit is a user, or None.

        Raises:
            ValueError: As for `users`.
        """
        return self._table.owners if unit == "user" else None

    def shapes(self, unit: Unit) -> Shapes:
        """Returns sizes and types, from the first training example."""
        record = streaming.read(self.train, np.zeros(1, np.int64))
        example = {
            name: jax.ShapeDtypeStruct(values.shape[1:], values.dtype)
            for name, values in record.items()
        }
        return Shapes(self.units(unit), example, self.num_classes)

    def for_selection(self, stride: int = 5) -> "Dataset":
        """Returns the training split with one of every `stride` examples as test split.

        Choices such as a learning rate then do not use the real test split. A fixed random draw
        selects the example, because classes may alternate in a file. The draw depends only on the
        position. If the data set is `mixed`, the last example is selected. A user may own examples
        of both parts.
        """
        firsts = stride * np.arange(self.train_size // stride)
        drawn = np.random.default_rng(0).integers(stride, size=len(firsts))
        held_out = np.zeros(self.train_size, bool)
        held_out[firsts + (stride - 1 if self.mixed else drawn)] = True
        return dataclasses.replace(
            self,
            train=self._part_of_train(~held_out),
            test=self._part_of_train(held_out),
            owners=None if self.owners is None else np.asarray(self.owners)[~held_out],
        )

    def _part_of_train(self, which: np.ndarray) -> Split:
        if not streaming.in_memory(self.train):
            raise ConfigError(
                f"dataset={self.name!r} must be in memory to hold out a part of it, got a streamed "
                "data set. Hold out a part when you register it."
            )
        return {name: values[which] for name, values in cast(Split, self.train).items()}


DATASETS: dict[str, Callable[..., Dataset]] = {}


def register_dataset(load: Callable[..., Dataset], name: str | None = None) -> Any:
    """Registers a function that loads a config's `dataset`; a decorator.

    The name is by default that of the function. If it requires an argument, it gets the config's
    `data_dir`.
    """
    DATASETS[load.__name__ if name is None else name] = load
    return load


@dataclasses.dataclass(frozen=True)
class DatasetSpec:
    """Specifies the data of a run. It is hashable, so that data are read once.

    Attributes:
        name: Name of the data set.
        data_dir: Directory with its files.
        progress: Whether to show a progress bar if reading takes long.
    """

    name: str
    data_dir: Path | None = None
    progress: bool = dataclasses.field(default=False, compare=False)

    def load(self) -> Dataset:
        """Reads and checks the data set.

        Raises:
            ConfigError: The name is unknown, the directory or a file is missing, a file is damaged,
                or examples are not finite.
        """
        dataset = self.read()
        _check_finite(self.name, dataset)
        return dataset

    def shapes(self, unit: Unit) -> Shapes:
        """Returns sizes and types."""
        return self.load().shapes(unit)

    def read(self) -> Dataset:
        """Calls the registered function and checks its result."""
        if self.name not in DATASETS:
            raise unknown_name("dataset", self.name, DATASETS)
        load = DATASETS[self.name]
        given = inspect.signature(load).parameters.values()
        takes_folder = any(parameter.default is parameter.empty for parameter in given)
        dataset = load(self.directory()) if takes_folder else load()
        _check_examples(self.name, dataset)
        return dataset

    def directory(self) -> Path:
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


def load_dataset(name: str, data_dir: str | Path | None = None) -> Dataset:
    """Reads the registered data set `name`; see `DatasetSpec`."""
    return DatasetSpec(name, None if data_dir is None else Path(data_dir)).load()


def _check_examples(name: str, dataset: object) -> None:
    """Raises a ConfigError if a registered function returns an invalid data set."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"The function of dataset={name!r} must return a Dataset, got a "
            f"{type(dataset).__name__}."
        )
    for which in ("train", "test"):
        split = getattr(dataset, which)
        if not isinstance(split, Mapping):
            continue  # a source that reads one record at a time
        needed = {"inputs"} if dataset.num_classes is None else {"inputs", "labels"}
        if not needed <= split.keys():
            raise ConfigError(
                f"The {which} split of dataset={name!r} must have columns 'inputs' and 'labels', "
                f"got {', '.join(map(repr, split)) or 'none'}."
            )
        for key, values in split.items():
            size = len(values)
            if not hasattr(values, "dtype") or not size or size != streaming.source_size(split):
                raise ConfigError(
                    f"The columns of the {which} split of dataset={name!r} must be equally long "
                    f"arrays with a row for each example, got a {type(values).__name__} of length "
                    f"{size} for {key!r}."
                )
        if dataset.num_classes is None:
            continue
        labels = split["labels"]
        if dataset.num_classes == 0 and len(labels.shape) == 2:
            continue
        if len(labels.shape) != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ConfigError(
                f"The {which} labels of dataset={name!r} must be integers of shape (N,), got "
                f"{labels.dtype} of shape {labels.shape}. Pass the class of each example."
            )
        least, most = int(np.min(labels[:])), int(np.max(labels[:]))
        if least < 0 or most >= dataset.num_classes:
            raise ConfigError(
                f"The {which} labels of dataset={name!r} must be from 0 to "
                f"{dataset.num_classes - 1}, got {least} to {most}. Correct the labels or "
                f"num_classes={dataset.num_classes}."
            )


def _check_finite(name: str, dataset: Dataset) -> None:
    """Raises a `ConfigError` if examples are not finite.

    Gradients that are not finite count as zero. The guarantee compares data sets of finite
    examples, so this error costs no privacy.
    """
    for which, split in (("training", dataset.train), ("test", dataset.test)):
        try:
            found, checked = streaming.count_not_finite(split)
        except ValueError as error:
            raise ConfigError(f"The {which} examples of dataset={name!r}: {error}") from None
        if found:
            raise ConfigError(
                f"The {which} examples of dataset={name!r} must be finite in float32, got NaN, "
                f"infinity or a larger number in {found} of {checked} examples. Remove these "
                "examples, or replace their values by a rule that looks at one example at a time."
            )


@register_dataset
def digits() -> Dataset:
    """Loads the handwritten digits of scikit-learn, 8x8 gray values in [0, 1].

    There are 1438 images for training and 359 for testing. Every fifth image is for testing, so
    that both splits have all writers. The values are divided by 16, a constant of the format.
    """
    from sklearn.datasets import load_digits  # imported late, because it takes a second

    images, labels = load_digits(return_X_y=True)
    inputs = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    examples = {"inputs": inputs, "labels": labels.astype(np.int32)}
    whole = Dataset("digits", examples, {}, 10, mixed=True)
    return whole.for_selection()
