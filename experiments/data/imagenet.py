"""Finds and reads ImageNet in the folders in which it is published."""

from pathlib import Path

from dpoptax.training import Dataset
from experiments.data.folders import load_folders
from experiments.data.formats import find, missing
from experiments.data.published_data import PublishedDataset, register


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


register(
    "imagenet",
    PublishedDataset(load_imagenet, 1_281_167, (224, 224, 3), 1000, find=find_imagenet),
)
