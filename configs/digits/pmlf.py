"""DP-PMLF on the handwritten digits: per-example momentum, behind a low-pass filter."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import PMLF


def get_config() -> TrainConfig:
    """The filter of the paper's experiments on MNIST."""
    return TrainConfig(method=PMLF(), learning_rate=1.5)
