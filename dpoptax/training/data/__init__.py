"""Data sets: registered functions, folders of images, and streams of records."""

from dpoptax.training.data.dataset import Dataset as Dataset
from dpoptax.training.data.dataset import load_dataset as load_dataset
from dpoptax.training.data.dataset import register_dataset as register_dataset
