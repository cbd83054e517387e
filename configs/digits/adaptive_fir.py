"""Configures DOPPLER on digits with a filter that is estimated during training."""

from dpoptax.training import TrainConfig
from experiments.methods import AdaptiveFir


def get_config() -> TrainConfig:
    """Returns the config, with the method's defaults."""
    return TrainConfig(method=AdaptiveFir(), learning_rate=1.5)
