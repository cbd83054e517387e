"""Configures DiSK on digits: look-ahead gradients, followed by a Kalman filter."""

from dpoptax.training import TrainConfig
from dpoptax.training.methods import Disk


def get_config() -> TrainConfig:
    """Returns the config, which needs one gradient per example: one weight is zero."""
    return TrainConfig(method=Disk(kappa=0.7, gamma=None), learning_rate=1.5)
