"""Training runs on dpoptax's public API: configs, data, models and the loop."""

from dpoptax.training.data import folders as folders  # they register their data sets
from dpoptax.training.data import images as images
from dpoptax.training.data import sentences as sentences
