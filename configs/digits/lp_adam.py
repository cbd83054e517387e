"""LP-Adam on the handwritten digits: Adam whose momentum is a low-pass filter."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import LPAdam


def get_config() -> TrainConfig:
    """The first-order filter of DOPPLER's Table 2."""
    return TrainConfig(method=LPAdam(), learning_rate=0.02)
