"""Configures DP-PMLF, Table 4: eight filters on the 5-layer CNN.

Names are DATASET/eps-E/filter-ROW.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import PMLF


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the rows of the table in order; the last row has no filter."""
    base = base_configs()
    return {
        f"{dataset}/eps-{epsilon:g}/filter-{row}": dataclasses.replace(
            base[dataset], epsilon=epsilon, method=PMLF(preset=f"pmlf-{row}")
        )
        for dataset in ("mnist", "cifar10")
        for epsilon in (2.0, 4.0, 6.0, 8.0)
        for row in range(1, 9)
    }
