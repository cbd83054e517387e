"""DiSK, Figure 8: κ against γ at ε = 8, with the grids of Table 2; 5-layer CNN, CIFAR-10.

Names are kappa-K/gamma-G; gamma-nag is (1 - κ)/κ, one gradient per example. The second panel, κ
against ε at γ = 1, is `kappa-*/gamma-1` with `--epsilon`.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import TrainConfig, load_configs
from dpoptax.training.methods import Disk

GAMMAS = {f"{gamma:g}": gamma for gamma in (0.2, 0.3, 0.5, 1.0, 2.0, 3.0)} | {"nag": None}


def get_configs() -> dict[str, TrainConfig]:
    """Forty-two pairs of gain and look-ahead."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    return {
        f"kappa-{kappa:g}/gamma-{name}": dataclasses.replace(base, method=Disk(kappa, gamma))
        for kappa in (0.99, 0.9, 0.8, 0.7, 0.6, 0.5)
        for name, gamma in GAMMAS.items()
    }
