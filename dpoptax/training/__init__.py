"""Training runs on dpoptax's public API: configs, data, models, the loop and the command line."""

from dpoptax.training import images as images  # registers its data sets
