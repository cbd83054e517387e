"""Configures the same training without privacy, as the accuracy to aim for."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import NonPrivate


def get_config() -> TrainConfig:
    """Returns the config; without clip and noise, epsilon and delta have no effect."""
    return TrainConfig(method=NonPrivate(), learning_rate=1.0)
