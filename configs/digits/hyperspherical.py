"""Configures the proven counterpart of GeoDP on digits."""

from dpoptax.training import TrainConfig
from experiments.methods import HypersphericalClip


def get_config() -> TrainConfig:
    """Returns the config, which clips in hyperspherical coordinates with shared noise."""
    return TrainConfig(method=HypersphericalClip(), learning_rate=1.5)
