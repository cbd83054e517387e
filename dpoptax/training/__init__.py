"""Trains models from configs, with the public API of dpoptax."""

from dpoptax.training.data import folders as folders  # it registers its data set
