"""Configures DiSK, Figure 8: κ over γ at ε = 8, and κ over ε at γ = 1.

The setting is the 5-layer CNN on CIFAR-10. Panel (a) is kappa-K/gamma-G, with the grids of Table 2.
gamma-nag means γ = (1 - κ)/κ, which needs one gradient per example. Panel (b) is
kappa-K/gamma-1/eps-E; its points at ε = 8 are kappa-K/gamma-1 of panel (a). The paper gives the
values of ε on the axis only. Here they are those of Table 6.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import Disk

KAPPAS = (0.99, 0.9, 0.8, 0.7, 0.6, 0.5)
GAMMAS = {f"{gamma:g}": gamma for gamma in (0.2, 0.3, 0.5, 1.0, 2.0, 3.0)} | {"nag": None}


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns configs for pairs of gain and look-ahead, and pairs of gain and ε."""
    base = base_configs()["cifar10"]
    first = {
        f"kappa-{kappa:g}/gamma-{name}": dataclasses.replace(base, method=Disk(kappa, gamma))
        for kappa in KAPPAS
        for name, gamma in GAMMAS.items()
    }
    second = {
        f"kappa-{kappa:g}/gamma-1/eps-{epsilon:g}": dataclasses.replace(
            base, method=Disk(kappa, 1.0), epsilon=epsilon
        )
        for kappa in KAPPAS
        for epsilon in (0.5, 1.0, 2.0, 4.0)
    }
    return first | second
