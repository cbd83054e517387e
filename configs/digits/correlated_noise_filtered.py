"""Configures correlated noise on digits, followed by a low-pass filter."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import CorrelatedNoise


def get_config() -> TrainConfig:
    """Returns the config; the filter removes high frequencies, which hold the noise."""
    return TrainConfig(
        method=CorrelatedNoise(preset="momentum"), learning_rate=1.5, sampling="cyclic"
    )
