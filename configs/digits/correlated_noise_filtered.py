"""Correlated noise on the handwritten digits, and a low-pass filter behind it."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import CorrelatedNoise


def get_config() -> TrainConfig:
    """The noise is in the high frequencies, which the filter takes off."""
    return TrainConfig(
        method=CorrelatedNoise(preset="momentum"), learning_rate=1.5, sampling="cyclic"
    )
