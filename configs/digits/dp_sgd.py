"""Configures DP-SGD on digits."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import DPSGD


def get_config() -> TrainConfig:
    """Returns the config, the baseline of the comparison."""
    return TrainConfig(method=DPSGD(), learning_rate=1.5)
