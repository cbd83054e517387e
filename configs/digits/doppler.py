"""Configures DOPPLER on digits: DP-SGD followed by a low-pass filter."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import Doppler


def get_config() -> TrainConfig:
    """Returns the config, with the first-order filter of the paper's Table 2."""
    return TrainConfig(method=Doppler(), learning_rate=1.5)
