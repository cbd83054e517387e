"""Configures DP-PMLF, Figures 6 and 7: weight and length of per-sample momentum.

The model is the 5-layer CNN. Names are DATASET/eps-E/beta-B (Figure 6, at k = 2) and
DATASET/eps-E/k-K (Figure 7, at β = 0.1).
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import PMLF


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns configs for β from 0.1 to 0.9 and for k from 2 to 6."""
    base = base_configs()
    rows = {}
    for dataset, preset in (("mnist", "pmlf-mnist"), ("cifar10", "pmlf-cifar")):
        sweep = {f"beta-{b:g}": PMLF(2, b, preset) for b in (0.1, 0.3, 0.5, 0.7, 0.9)}
        sweep |= {f"k-{k}": PMLF(k, 0.1, preset) for k in range(2, 7)}
        for epsilon in (2.0, 4.0, 6.0, 8.0):
            for name, method in sweep.items():
                rows[f"{dataset}/eps-{epsilon:g}/{name}"] = dataclasses.replace(
                    base[dataset], epsilon=epsilon, method=method
                )
    return rows
