"""Reads and streams data sets."""

from dpoptax.training.data.dataset import Dataset, load_digits

__all__ = ["Dataset", "load_digits"]


def __dir__() -> list[str]:
    return __all__
