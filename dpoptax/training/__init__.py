"""Training runs on dpoptax's public API: configs, data, models, the loop and the command line."""

from dpoptax.training import folders as folders  # they register their data sets
from dpoptax.training import images as images
from dpoptax.training import sentences as sentences
