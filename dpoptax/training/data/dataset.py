"""Data sets by name: a train and a test split, each a dict of equally long arrays or a source."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.data.features import FeatureMap, featured
from dpoptax.training.data.owners import read_owners
from dpoptax.training.data.tokens import Tokens
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.users import UserTable

Unit = Literal["example", "user"]
"""What ε is about: a training example, or a user with all of the examples that it owns."""

Kind = Literal["images", "sentences", "generation"]
"""What an example is: an image and its class, a row of tokens and its class, or a row of tokens and
as many labels, the token to come at each position or `NO_LABEL`."""

Split = dict[str, np.ndarray]
"""`{"inputs": (N, ...), "labels": (N, ...)}`: the leading axis counts examples."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set for classification, or for the generation of text.

    Attributes:
        name: The name it is registered under.
        train: The private examples, arrays as in `Split` or records of the same names; they may be
            larger than memory, for a step reads its batch only.
        test: Held-out examples. They are taken to be public: metrics on them cost no privacy.
        num_classes: Labels are 0, ..., num_classes - 1; 0 for generation, whose labels are tokens.
        kind: What an example is.
        texts: For generation: each source of the test split with all of its references.
        mixed: Whether the order repeats nothing, so that every fifth example is a fair sample.
        owners: For each training example whose it is, (N,), numbers or texts; None: not known.
        computed_from: Where training examples are features, checksums of what they were computed
            from, by name; none where they are as they were read.
    """

    name: str
    train: streaming.Source
    test: streaming.Source
    num_classes: int
    kind: Kind = "images"
    texts: tuple[tuple[str, tuple[str, ...]], ...] = ()
    mixed: bool = False
    owners: np.ndarray | None = None
    computed_from: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def train_size(self) -> int:
        """Number of training examples."""
        return streaming.source_size(self.train)

    @property
    def num_users(self) -> int:
        """Number of owners of training examples.

        Raises:
            ValueError: Owners that are not known, or not one for each example.
        """
        return self._table.num_users

    def users(self, records_per_user: int, *, seed: int) -> UserTable:
        """The owners and their examples, at most `records_per_user` in a step.

        Raises:
            ValueError: As for `num_users`.
        """
        return self._table.with_bound(records_per_user, seed=seed)

    @functools.cached_property
    def _table(self) -> UserTable:
        if self.owners is None:
            raise ConfigError(
                f"unit='user', and dataset={self.name!r} does not say whose its examples are; give "
                "--owners, a text file with a line for each training example, or unit='example'"
            )
        if len(self.owners) != self.train_size:
            raise ConfigError(
                f"dataset={self.name!r} has {len(self.owners)} owners for {self.train_size} "
                "training examples; give one for each"
            )
        return UserTable(self.owners, 1, seed=0)

    def units(self, unit: Unit) -> int:
        """Number of training examples, or of users where these are what ε is about.

        Raises:
            ValueError: As for `num_users`.
        """
        return self.num_users if unit == "user" else self.train_size

    def for_selection(self, stride: int = 5) -> "Dataset":
        """Training split only: one of each `stride` successive examples becomes the test split.

        What is selected on it, such as a learning rate, has not seen the real test split. Which one
        is drawn, for a file may have its classes take turns; it is a function of the place alone,
        not of the examples or of how many follow. Of a split that is `mixed` it is the last. A user
        may own examples of both parts.
        """
        firsts = stride * np.arange(self.train_size // stride)
        drawn = np.random.default_rng(0).integers(stride, size=len(firsts))
        held_out = np.zeros(self.train_size, bool)
        held_out[firsts + (stride - 1 if self.mixed else drawn)] = True
        return dataclasses.replace(
            self,
            train=self._part_of_train(~held_out),
            test=self._part_of_train(held_out),
            texts=(),
            owners=None if self.owners is None else np.asarray(self.owners)[~held_out],
        )

    def _part_of_train(self, which: np.ndarray) -> Split:
        def part(values: Any) -> Any:
            return values.only(which) if isinstance(values, streaming.Rows) else values[which]

        train = cast(Split, self.train)
        streamed = not isinstance(train, Mapping) or any(
            isinstance(values, np.memmap) for values in train.values()
        )
        if streamed:
            raise ConfigError(
                f"dataset={self.name!r} is streamed: hold out a part of it when you register it"
            )
        return {name: part(values) for name, values in train.items()}


DATASETS: dict[str, Callable[[], Dataset]] = {}


def register_dataset(load: Callable[[], Dataset]) -> Callable[[], Dataset]:
    """Decorator: makes `load` available as a config's `dataset` under its function name."""
    DATASETS[load.__name__] = load
    return load


@dataclasses.dataclass(frozen=True)
class FileDataset:
    """A data set that is read from files in a directory of the user's.

    Attributes:
        load: From that directory to the data set; where examples are texts, with `Tokens`.
        train_size: Number of training examples as published.
        input_shape: Shape of one image.
        num_classes: Number of classes; 0 for generation.
        kind: What an example is.
        find: Raises `formats.MissingFilesError` if that directory lacks a file; reads none.
    """

    load: Callable[..., Dataset]
    train_size: int
    input_shape: tuple[int, ...] = ()
    num_classes: int = 0
    kind: Kind = "images"
    find: Callable[[Path], object] = lambda data_dir: None

    def example(self, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of one example, of `length` tokens if it is a text."""
        if self.kind == "images":
            inputs = jax.ShapeDtypeStruct(self.input_shape, np.float32)
        else:
            inputs = jax.ShapeDtypeStruct((length,), np.int32)
        labels = (length,) if self.kind == "generation" else ()
        return {"inputs": inputs, "labels": jax.ShapeDtypeStruct(labels, np.int32)}


FILE_DATASETS: dict[str, FileDataset] = {}


def register_file_dataset(name: str, dataset: FileDataset) -> None:
    """Makes `dataset` available as a config's `dataset`, with its `data_dir`."""
    FILE_DATASETS[name] = dataset


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    tokens: Tokens = Tokens(None, 128),  # noqa: B008
    features: FeatureMap | None = None,
    *,
    owners: Path | None = None,
    progress: bool = False,
) -> Dataset:
    """The data set registered under `name`; one of files is read from `data_dir`.

    Args:
        name: Of the data set.
        data_dir: Directory of its files as they are published.
        tokens: How its texts become arrays, if it has texts.
        features: What takes the place of its images; None: the images themselves.
        owners: File that says whose its training examples are; None: what it says of itself.
        progress: Whether to show a progress bar while features are computed.

    Raises:
        ConfigError: No such name, no directory for one of files, a file missing or damaged,
            examples that are not finite, that have no such features, or a file of owners that does
            not fit.
    """
    dataset = _examples(name, data_dir, tokens)
    _check_finite(name, dataset)
    if owners is not None:
        if dataset.owners is not None:
            raise ConfigError(
                f"owners={str(owners)!r}, and dataset={name!r} says itself whose its examples are; "
                "leave the file out, or the column of the data"
            )
        labels = read_owners(owners, dataset.train_size)
        dataset = dataclasses.replace(dataset, owners=labels)
    if features is None:
        return dataset
    if dataset.kind != "images":
        raise ConfigError(
            f"features={features.name!r} are of images, and dataset={name!r} is for "
            f"{dataset.kind}; give features='none'"
        )
    train, test = (
        featured(split, features, name=f"{name}, {which}", progress=progress)
        for which, split in (("train", dataset.train), ("test", dataset.test))
    )
    checksums = streaming.checksums(cast(Split, dataset.train))
    return dataclasses.replace(dataset, train=train, test=test, computed_from=checksums)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What of a data set a run wants; hashable, so that equal ones can be read once.

    Its fields are the arguments of `load_dataset`; `progress` changes nothing of what is read.
    """

    name: str
    data_dir: Path | None = None
    tokens: Tokens = Tokens(None, 128)
    features: FeatureMap | None = None
    owners: Path | None = None
    progress: bool = dataclasses.field(default=False, compare=False)

    def load(self) -> Dataset:
        """The data set, read.

        Raises:
            ConfigError: As for `load_dataset`.
        """
        return load_dataset(**vars(self))


def _examples(name: str, data_dir: str | Path | None, tokens: Tokens) -> Dataset:
    if name in DATASETS:
        dataset = DATASETS[name]()
        _check_examples(name, dataset)
        return dataset
    if name not in FILE_DATASETS:
        raise unknown_name("dataset", name, (*DATASETS, *FILE_DATASETS))
    if data_dir is None:
        raise ConfigError(
            f"data_dir=None, and dataset={name!r} is read from files; give --data-dir, the "
            "directory that holds them as they are published"
        )
    if not Path(data_dir).is_dir():
        raise ConfigError(f"data_dir={str(data_dir)!r} is not a directory; give an existing one")
    published = FILE_DATASETS[name]
    if published.kind == "images":
        return published.load(Path(data_dir))
    return published.load(Path(data_dir), tokens)


def _check_examples(name: str, dataset: object) -> None:
    """Raises where what a registered function returned cannot be trained on."""
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"dataset={name!r}: its function returned a {type(dataset).__name__}; return a Dataset"
        )
    for which in ("train", "test"):
        split = getattr(dataset, which)
        if not isinstance(split, Mapping):
            continue  # a source that reads one record at a time
        if not {"inputs", "labels"} <= split.keys():
            raise ConfigError(
                f"dataset={name!r}, {which} has {', '.join(map(repr, split)) or 'nothing'}; give "
                "'inputs' and 'labels'"
            )
        for key, values in split.items():
            size = len(values)
            if not hasattr(values, "dtype") or not size or size != streaming.source_size(split):
                raise ConfigError(
                    f"dataset={name!r}, {which}[{key!r}] is a {type(values).__name__} of length "
                    f"{size}; give equally long arrays, with a row for each example"
                )
        if dataset.kind == "generation":
            continue
        labels = split["labels"]
        if len(labels.shape) != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise ConfigError(
                f"dataset={name!r}, {which}['labels'] are {labels.dtype} of shape {labels.shape}; "
                "give the number of each example's class, integers of shape (N,)"
            )
        least, most = int(np.min(labels[:])), int(np.max(labels[:]))
        if least < 0 or most >= dataset.num_classes:
            raise ConfigError(
                f"dataset={name!r}, {which}['labels'] are from {least} to {most}; give 0 to "
                f"{dataset.num_classes - 1}, as num_classes={dataset.num_classes}"
            )


def _check_finite(name: str, dataset: Dataset) -> None:
    """Raises a `ConfigError` if examples are not finite: their gradients would count as zero.

    ε compares data sets of finite examples, so refusing other ones is part of no release.
    """
    for which, split in (("training", dataset.train), ("test", dataset.test)):
        found, checked = streaming.count_not_finite(split)
        if found:
            raise ConfigError(
                f"dataset={name!r}: {found} of {checked} {which} examples that were checked hold "
                "NaN, an infinity, or a number beyond the range of float32. Leave these examples "
                "out, or replace the values by a rule that looks at one example at a time."
            )


@register_dataset
def digits() -> Dataset:
    """Handwritten digits, 8x8 grey values in [0, 1]: 1438 for training, 359 for testing.

    They come with scikit-learn. Every fifth image is for testing, so that both splits have all
    the writers. The scaling by 16, the largest value of the format, reveals nothing of the data.
    """
    images, labels = _digits()
    inputs = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    examples = {"inputs": inputs, "labels": labels.astype(np.int32)}
    whole = Dataset("digits", examples, {}, 10, mixed=True)
    return whole.for_selection()


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """`sklearn.datasets.load_digits`: its file, read without importing all of scikit-learn."""
    found = importlib.util.find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    from sklearn.datasets import load_digits  # where it has its files elsewhere, or is missing

    images, labels = load_digits(return_X_y=True)
    return images, labels
