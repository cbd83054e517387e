"""Configures DiSK, Figure 1: MNIST, CIFAR-10 and CIFAR-100 at several ε.

The models are the 5-layer CNN, and WRN-16-4 on CIFAR-100. Names are DATASET/eps-E/METHOD; κ = 0.7,
γ = 0.5 (Table 2). The paper gives the values of ε on the axes of the figure only. Here they are
those of Table 6.

`disk_swapped` is not in the figure. It is DiSK with the filter of the code published with Opacus,
which swaps the two weights, so that its gain is 1 - κ = 0.3. That code also divides the noise
multiplier by √(c² + (1 - c)²), which invalidates its ε. We do not reproduce that.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Disk


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the base optimizer, DiSK on it, and DiSK with the published code's gain."""
    base = base_configs()
    methods = {
        "base": DPSGD(),
        "disk": Disk(kappa=0.7, gamma=0.5),
        "disk_swapped": Disk(kappa=0.7, gamma=0.5, filter_gain=0.3),
    }
    return {
        f"{dataset}/eps-{epsilon:g}/{name}": dataclasses.replace(
            base[dataset], epsilon=epsilon, method=method
        )
        for dataset in ("mnist", "cifar10", "cifar100")
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)
        for name, method in methods.items()
    }
