"""The same training without privacy on the handwritten digits: the accuracy to aim for."""

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import NonPrivate


def get_config() -> TrainConfig:
    """No clip and no noise; epsilon and delta have no meaning here."""
    return TrainConfig(method=NonPrivate(), learning_rate=1.0)
