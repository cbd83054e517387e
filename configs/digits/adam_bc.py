"""Adam on the handwritten digits that knows the noise in its second moment."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import AdamBC


def get_config() -> TrainConfig:
    """The method's defaults."""
    return TrainConfig(method=AdamBC(), learning_rate=0.005)
