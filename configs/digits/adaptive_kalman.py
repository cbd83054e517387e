"""Configures a Kalman filter on digits that estimates its gain."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import AdaptiveKalman


def get_config() -> TrainConfig:
    """Returns the config, with the method's defaults."""
    return TrainConfig(method=AdaptiveKalman(), learning_rate=1.5)
