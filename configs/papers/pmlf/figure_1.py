"""Configures DP-PMLF, Figure 1: two earlier methods and DPSGD on CIFAR-10.

The 5-layer CNN is trained for 100 epochs. Names are eps-E/METHOD: LP-DPSGD at ε = 8 (panel a),
InnerOuter at ε = 1 (panel b). Both end below DPSGD in the paper. The filter of LP-DPSGD and the
momenta of InnerOuter are not stated; here they are those of table_1_3.py.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler, InnerOuter

PANELS = {
    8.0: {"dp_sgd": DPSGD(), "lp_dp_sgd": Doppler("pmlf-cifar")},
    1.0: {"dp_sgd": DPSGD(), "inner_outer": InnerOuter()},
}


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns two curves for each panel."""
    base = base_configs()["cifar10"]
    return {
        f"eps-{epsilon:g}/{name}": dataclasses.replace(
            base, epsilon=epsilon, steps=100 * 50, method=method
        )
        for epsilon, methods in PANELS.items()
        for name, method in methods.items()
    }
