"""Inner-outer momentum on the handwritten digits: DP-PMLF without its normalisation."""

from dpoptax.training.config import TrainConfig
from experiments.methods import InnerOuter


def get_config() -> TrainConfig:
    """The method's defaults."""
    return TrainConfig(method=InnerOuter(), learning_rate=0.15)
