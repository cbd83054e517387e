"""Configures inner-outer momentum on digits: DP-PMLF without normalization."""

from dpoptax.training import TrainConfig
from experiments.methods import InnerOuter


def get_config() -> TrainConfig:
    """Returns the config, with the method's defaults."""
    return TrainConfig(method=InnerOuter(), learning_rate=0.15)
