"""Reads MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from their published files.

Gray values are mapped to [0, 1], and colors to [-2, 2]. Both maps are constants of the format. They
use no statistic of the private data, so they cost no privacy.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dpoptax.training import ConfigError, Dataset, Split
from experiments.data import formats
from experiments.data.published_data import PUBLISHED, PublishedDataset


def load_mnist(data_dir: Path, name: str, folders: Sequence[str]) -> Dataset:
    """Reads a data set of four IDX files, plain or gzipped, with images (28, 28, 1).

    Args:
        data_dir: Folder of the files, or of one of `folders`.
        name: Name under which the data set is registered.
        folders: Other folders that may hold the files, in order of preference.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    splits = []
    for split, files in find_mnist(data_dir, name, folders).items():
        images, labels = (
            formats.read_idx(path, ndim) for path, ndim in zip(files, (3, 1), strict=True)
        )
        inputs = images[..., None].astype(np.float32) / 255
        splits.append(_split(inputs, labels, 10, f"{split}-labels", name))
    return Dataset(name, splits[0], splits[1], 10)


def find_mnist(data_dir: Path, name: str, folders: Sequence[str]) -> dict[str, tuple[Path, Path]]:
    """Returns the files of images and labels of each split; see `load_mnist`."""
    return {
        split: (
            _idx(data_dir, folders, f"{split}-images", 3, name),
            _idx(data_dir, folders, f"{split}-labels", 1, name),
        )
        for split in ("train", "t10k")
    }


def load_cifar(data_dir: Path, num_classes: int) -> Dataset:
    """Reads the "python version" of CIFAR-10 or CIFAR-100, as an archive or unpacked.

    The images are (32, 32, 3). CIFAR-100 has its fine labels.

    Raises:
        ConfigError: A file is missing or damaged.
    """
    name, ten = f"cifar{num_classes}", num_classes == 10
    top = _cifar_folder(num_classes)
    source = find_cifar(data_dir, num_classes)
    train = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
    splits = []
    for files in (train, ["test_batch" if ten else "test"]):
        label = "labels" if ten else "fine_labels"
        parts = [
            formats.read_cifar(content, source / file, label)
            for file, content in zip(files, formats.members(source, top, files), strict=True)
        ]
        images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
        inputs = (images.astype(np.float32) / 255 - 0.5) / 0.25
        splits.append(_split(inputs, labels, num_classes, files[0], name))
    return Dataset(name, splits[0], splits[1], num_classes)


def find_cifar(data_dir: Path, num_classes: int) -> Path:
    """Returns the folder or archive; see `load_cifar`."""
    archive = f"cifar-{num_classes}-python.tar.gz"
    names = (_cifar_folder(num_classes), archive)
    source = formats.find(data_dir, (f"cifar{num_classes}",), names)
    if source is None:
        raise formats.missing(f"cifar{num_classes}", data_dir, f"{archive} or it unpacked")
    return source


def _cifar_folder(num_classes: int) -> str:
    return "cifar-10-batches-py" if num_classes == 10 else "cifar-100-python"


def _idx(data_dir: Path, folders: Sequence[str], stem: str, dimensions: int, name: str) -> Path:
    # Some unpacked copies have a dot instead of the last hyphen in their names.
    plain = (f"{stem}-idx{dimensions}-ubyte", f"{stem}.idx{dimensions}-ubyte")
    path = formats.find(data_dir, folders, [*plain, *(f"{file}.gz" for file in plain)])
    if path is None:
        raise formats.missing(name, data_dir, f"{plain[0]} or {plain[0]}.gz")
    return path


def _split(inputs: np.ndarray, labels: np.ndarray, classes: int, file: str, name: str) -> Split:
    if len(inputs) != len(labels):
        raise ConfigError(
            f"{file} of dataset={name!r} must have one label for each image, got {len(labels)} "
            f"labels for {len(inputs)} images. Use both files of one release."
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise ConfigError(
            f"{file} of dataset={name!r} must have labels from 0 to {classes - 1}, got "
            f"{labels.min()} to {labels.max()}. Check that `data_dir` holds this data set."
        )
    return {"inputs": inputs, "labels": labels.astype(np.int32)}


for _name, _folders in (
    ("mnist", ("mnist", "MNIST/raw", "MNIST")),
    ("fashion_mnist", ("fashion_mnist", "FashionMNIST/raw", "FashionMNIST", "fashion-mnist")),
):
    _load = functools.partial(load_mnist, name=_name, folders=_folders)
    _find: Callable[[Path], object] = functools.partial(find_mnist, name=_name, folders=_folders)
    PUBLISHED[_name] = PublishedDataset(_load, _find, 60_000, 10, (28, 28, 1))
for _classes in (10, 100):
    _load = functools.partial(load_cifar, num_classes=_classes)
    _find = functools.partial(find_cifar, num_classes=_classes)
    _cifar = PublishedDataset(_load, _find, 50_000, _classes, formats.CIFAR_SHAPE)
    PUBLISHED[f"cifar{_classes}"] = _cifar
