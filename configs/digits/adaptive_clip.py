"""Configures a clipping bound on digits that follows the median gradient norm."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import AdaptiveClip


def get_config() -> TrainConfig:
    """Returns the config, with the method's defaults."""
    return TrainConfig(method=AdaptiveClip(), learning_rate=0.75)
