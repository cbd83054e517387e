"""DP-SGD on the handwritten digits."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD


def get_config() -> TrainConfig:
    """The baseline of the comparison."""
    return TrainConfig(method=DPSGD(), learning_rate=1.5)
