"""Configures signs of noisy gradients on digits; `FILE:NAME` selects one config.

Shrinkage and Muon were measured with the config of commit c6d0562f, the last one that has them.
"""

from experiments.config import ExperimentConfig
from experiments.methods import SignSGD


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the sign of each release, and of a running mean."""
    return {
        "sign_sgd": ExperimentConfig(method=SignSGD(), learning_rate=0.01),
        "sign_momentum": ExperimentConfig(method=SignSGD(decay=0.9), learning_rate=0.01),
    }
