"""A clip norm that follows the median gradient norm, on the handwritten digits."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import AdaptiveClip


def get_config() -> TrainConfig:
    """The method's defaults."""
    return TrainConfig(method=AdaptiveClip(), learning_rate=0.75)
