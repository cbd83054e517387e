"""DOPPLER on the handwritten digits with a filter that is estimated on the way."""

from dpoptax.training.config import TrainConfig
from experiments.methods import AdaptiveFir


def get_config() -> TrainConfig:
    """The method's defaults."""
    return TrainConfig(method=AdaptiveFir(), learning_rate=1.5)
