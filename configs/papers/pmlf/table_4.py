"""Configures DP-PMLF, Table 4: eight filters on the 5-layer CNN.

Names are DATASET/eps-E/filter-ROW.
"""

import dataclasses
from pathlib import Path

from dpoptax.training import load_configs
from dpoptax.training.methods import PMLF
from experiments.config import ExperimentConfig


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the rows of the table in order; the last row has no filter."""
    base = load_configs(Path(__file__).with_name("base.py"))
    return {
        f"{dataset}/eps-{epsilon:g}/filter-{row}": dataclasses.replace(
            base[dataset], epsilon=epsilon, method=PMLF(preset=f"pmlf-{row}")
        )
        for dataset in ("mnist", "cifar10")
        for epsilon in (2.0, 4.0, 6.0, 8.0)
        for row in range(1, 9)
    }
