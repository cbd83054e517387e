"""Configures DP-PMLF on digits: per-example momentum, then a low-pass filter."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import PMLF


def get_config() -> TrainConfig:
    """Returns the config, with the filter of the paper's experiments on MNIST."""
    return TrainConfig(method=PMLF(), learning_rate=1.5)
