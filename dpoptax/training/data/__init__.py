"""Registers, reads and streams data sets."""

from dpoptax.training.data.dataset import Dataset as Dataset
from dpoptax.training.data.dataset import load_dataset as load_dataset
from dpoptax.training.data.dataset import register_dataset as register_dataset
