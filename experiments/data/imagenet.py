"""Reads ImageNet, or other images in class folders: train/CLASS/NAME.jpeg, val/CLASS/NAME.jpeg.

A step reads and decodes the images of its batch, so they may be larger than memory.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training import ConfigError, Dataset
from experiments.data.formats import find, missing
from experiments.data.published_data import PUBLISHED, PublishedDataset

SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Images by number, ordered by class and name. Each is decoded when it is read.

    The shorter side is scaled to 8/7 of `size`, the center is cut out, and colors are scaled to
    [-2, 2] by constants.

    Attributes:
        paths: The files.
        labels: Their classes.
        size: Height and width of the result.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: int = 224

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `{"inputs": (size, size, 3) float32, "labels": int32}`.

        Raises:
            ConfigError: A file that is not an image.
        """
        from PIL import Image, ImageOps

        path = self.paths[index]
        try:
            with Image.open(path) as image:
                scaled = ImageOps.cover(
                    image.convert("RGB"), (self.size * 8 // 7,) * 2, Image.Resampling.BILINEAR
                )
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ConfigError(
                f"{path} cannot be read as an image ({error}). Replace or remove it."
            ) from error
        left, top = ((side - self.size) // 2 for side in scaled.size)
        middle = scaled.crop((left, top, left + self.size, top + self.size))
        inputs = scaled_colors(np.asarray(middle))
        return {"inputs": inputs, "labels": np.int32(self.labels[index])}


def scaled_colors(values: np.ndarray) -> np.ndarray:
    """Maps 0, ..., 255 to [-2, 2] as float32, by constants: (x/255 - 0.5)/0.25."""
    return (values.astype(np.float32) / 255 - 0.5) / 0.25


def load_folders(train: Path, val: Path, name: str) -> Dataset:
    """Reads images in class folders; classes are in sorted order.

    Raises:
        ConfigError: A folder without images, or a class that `train` does not have.
    """
    classes = sorted(path.name for path in train.iterdir() if path.is_dir())
    splits = [_read_split(folder, classes) for folder in (train, val)]
    return Dataset(name, splits[0], splits[1], len(classes))


def _read_split(folder: Path, classes: list[str]) -> ImageFolder:
    numbers = {name: number for number, name in enumerate(classes)}
    paths, labels = [], []
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        if path.parent.name not in numbers:
            raise ConfigError(
                f"{path.parent} must be a class of the training images, got another name. Put the "
                "validation images into folders with the same names."
            )
        paths.append(path)
        labels.append(numbers[path.parent.name])
    if not paths:
        raise ConfigError(
            f"{folder} must have images in class folders, got none. Put each image as "
            "CLASS/NAME.JPEG."
        )
    return ImageFolder(tuple(paths), tuple(labels))


def load_imagenet(data_dir: Path) -> Dataset:
    """Reads ImageNet, or any images in class folders under train/ and val/.

    Raises:
        ConfigError: A folder is missing or has no images, or val/ has a class that train/ lacks.
    """
    return load_folders(*find_imagenet(data_dir), "imagenet")


def find_imagenet(data_dir: Path) -> tuple[Path, Path]:
    """Returns the folders of both splits; see `load_imagenet`."""
    train, val = (
        find(data_dir, ("imagenet", "ILSVRC/Data/CLS-LOC"), [split]) for split in ("train", "val")
    )
    if train is None or val is None:
        raise missing(
            "imagenet",
            data_dir,
            f"a folder {'train' if train is None else 'val'}/ of class folders",
            "put the files there from https://image-net.org/download, which requires an account",
        )
    return train, val


PUBLISHED["imagenet"] = PublishedDataset(
    load_imagenet, 1_281_167, (224, 224, 3), 1000, find=find_imagenet
)
