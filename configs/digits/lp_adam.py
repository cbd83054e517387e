"""Configures LP-Adam on digits: Adam with a low-pass filter as its momentum."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import LPAdam


def get_config() -> TrainConfig:
    """Returns the config, with the first-order filter of DOPPLER's Table 2."""
    return TrainConfig(method=LPAdam(), learning_rate=0.02)
