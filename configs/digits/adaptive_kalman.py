"""A Kalman filter on the handwritten digits that needs no gain."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import AdaptiveKalman


def get_config() -> TrainConfig:
    """The method's defaults."""
    return TrainConfig(method=AdaptiveKalman(), learning_rate=1.5)
