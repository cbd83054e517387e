"""Registers, reads and streams data sets."""

from dpoptax.training.data.dataset import Dataset, load_dataset, register_dataset

__all__ = ["Dataset", "load_dataset", "register_dataset"]


def __dir__() -> list[str]:
    return __all__
