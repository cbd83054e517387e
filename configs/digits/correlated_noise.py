"""Configures correlated noise on digits; later steps cancel part of the noise."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import CorrelatedNoise


def get_config() -> TrainConfig:
    """Returns the config, with four bands and four groups of examples in turn."""
    return TrainConfig(method=CorrelatedNoise(), learning_rate=1.5, sampling="cyclic")
