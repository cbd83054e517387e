"""DiSK on the handwritten digits: gradients that look ahead, behind a Kalman filter."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import Disk


def get_config() -> TrainConfig:
    """One gradient per example: at this look-ahead the second weight is zero."""
    return TrainConfig(method=Disk(kappa=0.7, gamma=None), learning_rate=1.5)
