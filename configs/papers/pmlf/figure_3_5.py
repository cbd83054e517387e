"""Configures DP-PMLF, Figures 3 (ablations), 4 (more ε) and 5 (ResNet-18).

Names are figure_N/DATASET/…/METHOD. Figures 3 and 4 range over ε from 1 to 8 and give the grid on
the axes only; here it is 1, 2, 4, 6, 8. Figure 4 uses the 5-layer CNN; its points at 1 and 8 are in
table_1_3.py. Figure 5 has 100 epochs and ε = 1. InnerOuter and LP-DPSGD are those of table_1_3.py.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, PMLF, Doppler, InnerOuter


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the configs; "w/o PM" has one iterate, and "w/o LF" has no filter."""
    rows = {}
    for dataset, base in base_configs().items():
        preset = "pmlf-cifar" if "cifar" in dataset else "pmlf-mnist"
        pmlf, plain = PMLF(2, 0.1, preset), PMLF(2, 0.1, "none")
        if dataset in ("mnist", "cifar10"):
            for model in ("cnn_5", "resnet_18"):
                for epsilon in (1.0, 2.0, 4.0, 6.0, 8.0):
                    parts = {"pmlf": pmlf, "without_pm": Doppler(preset), "without_lf": plain}
                    for name, method in parts.items():
                        rows[f"figure_3/{dataset}/{model}/eps-{epsilon:g}/{name}"] = (
                            dataclasses.replace(base, model=model, epsilon=epsilon, method=method)
                        )
        methods = {
            "dp_sgd": DPSGD(),
            "lp_dp_sgd": Doppler(preset),
            "inner_outer": InnerOuter(),
            "pmlf": pmlf,
        }
        for name, method in methods.items():
            for epsilon in (2.0, 4.0, 6.0):
                rows[f"figure_4/{dataset}/eps-{epsilon:g}/{name}"] = dataclasses.replace(
                    base, epsilon=epsilon, method=method
                )
            steps = 100 * (50 if "cifar" in dataset else 60)
            rows[f"figure_5/{dataset}/{name}"] = dataclasses.replace(
                base, model="resnet_18", steps=steps, method=method
            )
    return rows
