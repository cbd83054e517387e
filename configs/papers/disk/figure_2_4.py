"""Configures DiSK, Figures 2 (MNIST and CIFAR-100) and 4 (three models on CIFAR-10).

Names are DATASET/MODEL/METHOD; κ = 0.7, γ = 0.5. The captions state ε: 0.5 on MNIST, 8 on
CIFAR-100, 4 on CIFAR-10. For CIFAR-100, section 5.2 states 41.8 % and Table 6 states 42.0 %.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Disk

PANELS = (
    ("mnist", "cnn_5", 0.5),
    ("cifar100", "wrn_16_4", 8.0),
    ("cifar10", "cnn_5", 4.0),
    ("cifar10", "wrn_16_4", 4.0),
    ("cifar10", "vit_small", 4.0),
)


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the base optimizer, and DiSK on it."""
    base = base_configs()
    return {
        f"{dataset}/{model}/{name}": dataclasses.replace(
            base[dataset], model=model, epsilon=epsilon, method=method
        )
        for dataset, model, epsilon in PANELS
        for name, method in (("base", DPSGD()), ("disk", Disk(kappa=0.7, gamma=0.5)))
    }
