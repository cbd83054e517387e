"""DiSK, Figure 1: MNIST and CIFAR-10 (5-layer CNN), CIFAR-100 (WRN-16-4) at several ε.

Names are DATASET/eps-E/METHOD. The ε are those of Table 6; κ = 0.7, γ = 0.5.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import TrainConfig, load_configs
from dpoptax.training.methods import DPSGD, Disk


def get_configs() -> dict[str, TrainConfig]:
    """The base optimizer, and DiSK on it."""
    base = load_configs(Path(__file__).with_name("base.py"))
    return {
        f"{dataset}/eps-{epsilon:g}/{name}": dataclasses.replace(
            base[dataset], epsilon=epsilon, method=method
        )
        for dataset in ("mnist", "cifar10", "cifar100")
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)
        for name, method in (("base", DPSGD()), ("disk", Disk(kappa=0.7, gamma=0.5)))
    }
