"""Gradients on the handwritten digits that are means over shifted copies of an example."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import Augmented


def get_config() -> TrainConfig:
    """Four copies, each moved by a pixel at most."""
    return TrainConfig(method=Augmented(), learning_rate=0.75)
