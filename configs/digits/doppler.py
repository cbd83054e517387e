"""DOPPLER on the handwritten digits: DP-SGD behind a low-pass filter."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import Doppler


def get_config() -> TrainConfig:
    """The first-order filter of the paper's Table 2."""
    return TrainConfig(method=Doppler(), learning_rate=1.5)
