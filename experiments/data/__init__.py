"""Reads and downloads published data sets, and computes features of their images."""

from experiments.data import images as images  # these register their data sets
from experiments.data import sentences as sentences
from experiments.data.published_data import PUBLISHED as PUBLISHED
