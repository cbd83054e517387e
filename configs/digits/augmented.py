"""Configures gradients on digits that are means over shifted copies of an example."""

from dpoptax.training import TrainConfig
from experiments.methods import Augmented


def get_config() -> TrainConfig:
    """Returns the config, with four copies that are shifted by at most one pixel."""
    return TrainConfig(method=Augmented(), learning_rate=0.75)
