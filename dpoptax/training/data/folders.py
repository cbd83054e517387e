"""Images in a folder for each class, as ImageNet is published: train/CLASS/NAME.JPEG, val/CLASS/…

They are too many for memory: a step reads and decodes those of its batch.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from dpoptax.training.data.dataset import Dataset, FileDataset, register_file_dataset
from dpoptax.training.data.formats import damaged, find, missing, scaled_colours
from dpoptax.training.errors import ConfigError

SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclasses.dataclass(frozen=True)
class ImageFolder:
    """Images by number, in the order of class and name; each is decoded when it is asked for.

    The shorter side is scaled to 8/7 of `size`, the middle is cut out, and colours go to [-2, 2].

    Attributes:
        paths: The files.
        labels: Their classes.
        size: Height and width of the result.
    """

    paths: tuple[Path, ...]
    labels: tuple[int, ...]
    size: int = 224

    def __len__(self) -> int:
        """The number of images."""
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`{"inputs": (size, size, 3) float32, "labels": int32}`.

        Raises:
            ConfigError: A file that is no image.
        """
        from PIL import Image, ImageOps

        path = self.paths[index]
        try:
            with Image.open(path) as image:
                scaled = ImageOps.cover(
                    image.convert("RGB"), (self.size * 8 // 7,) * 2, Image.Resampling.BILINEAR
                )
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise damaged(path, f"it is no image ({error})") from error
        left, top = ((side - self.size) // 2 for side in scaled.size)
        middle = scaled.crop((left, top, left + self.size, top + self.size))
        inputs = scaled_colours(np.asarray(middle))
        return {"inputs": inputs, "labels": np.int32(self.labels[index])}


def load_imagenet(data_dir: Path) -> Dataset:
    """ImageNet, or any images in class folders under train/ and val/; classes in sorted order.

    Raises:
        ConfigError: A folder missing or without images, or a class that train/ does not have.
    """
    folders = find_imagenet(data_dir)
    classes = sorted(path.name for path in folders[0].iterdir() if path.is_dir())
    splits = [_read_split(folder, classes) for folder in folders]
    return Dataset("imagenet", splits[0], splits[1], len(classes))


def find_imagenet(data_dir: Path) -> tuple[Path, Path]:
    """The folders of both splits; see `load_imagenet`."""
    train, val = (
        find(data_dir, ("imagenet", "ILSVRC/Data/CLS-LOC"), [split]) for split in ("train", "val")
    )
    if train is None or val is None:
        raise missing(
            "imagenet",
            data_dir,
            f"a folder {'train' if train is None else 'val'}/ of class folders",
            "from https://image-net.org/download, which asks for an account",
        )
    return train, val


def _read_split(folder: Path, classes: list[str]) -> ImageFolder:
    numbers = {name: number for number, name in enumerate(classes)}
    paths, labels = [], []
    for path in sorted(folder.glob("*/*")):
        if path.suffix.lower() not in SUFFIXES:
            continue
        if path.parent.name not in numbers:
            raise ConfigError(
                f"{path.parent} is a class that the training images do not have; the validation "
                "images have to lie in folders of the same names"
            )
        paths.append(path)
        labels.append(numbers[path.parent.name])
    if not paths:
        raise ConfigError(
            f"{folder} has no images in class folders; put each image as CLASS/NAME.JPEG"
        )
    return ImageFolder(tuple(paths), tuple(labels))


register_file_dataset(
    "imagenet",
    FileDataset(load_imagenet, 1_281_167, (224, 224, 3), 1000, find=find_imagenet),
)
