"""GeoDP's proven counterpart on the handwritten digits."""

from dpoptax.training.config import TrainConfig
from experiments.methods import HypersphericalClip


def get_config() -> TrainConfig:
    """Each example clipped in hyperspherical coordinates; magnitude and angles share one noise."""
    return TrainConfig(method=HypersphericalClip(), learning_rate=1.5)
