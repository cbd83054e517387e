"""Noise that later steps take back in part, on the handwritten digits."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import CorrelatedNoise


def get_config() -> TrainConfig:
    """Four bands, and four groups of examples that take turns."""
    return TrainConfig(method=CorrelatedNoise(), learning_rate=1.5, sampling="cyclic")
