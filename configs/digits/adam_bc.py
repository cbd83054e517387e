"""Configures DP-AdamBC on digits: Adam with noise-corrected second moments."""

from dpoptax.training import TrainConfig
from experiments.methods import AdamBC


def get_config() -> TrainConfig:
    """Returns the config, with the method's defaults."""
    return TrainConfig(method=AdamBC(), learning_rate=0.005)
