"""Configures DP-PMLF, Tables 1 (ViT) and 3 (ResNet-18), and Figure 4 at two ε.

Figure 4 at ε = 1 and 8 uses the 5-layer CNN. Names are DATASET/eps-E/MODEL/METHOD. Not stated, and
assumed: the filter of LP-DPSGD, here that of DP-PMLF on the same data set; the momenta of
InnerOuter, here 0.1 over two iterates and 0.9; the size of the ViT, here width 64 and depth 4.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, PMLF, Doppler, InnerOuter

MODELS = {"vit": "vit_tiny", "resnet": "resnet_18", "cnn": "cnn_5"}


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns β = 0.1, k = 2, a = -0.9; b = 0.1, or b = (0.15, -0.05) on CIFAR."""
    rows = {}
    for dataset, base in base_configs().items():
        preset = "pmlf-cifar" if "cifar" in dataset else "pmlf-mnist"
        methods = {
            "dp_sgd": DPSGD(),
            "lp_dp_sgd": Doppler(preset=preset),
            "inner_outer": InnerOuter(),
            "pmlf": PMLF(length=2, beta=0.1, preset=preset),
        }
        for epsilon in (1.0, 8.0):
            for label, model in MODELS.items():
                for name, method in methods.items():
                    rows[f"{dataset}/eps-{epsilon:g}/{label}/{name}"] = dataclasses.replace(
                        base, model=model, epsilon=epsilon, method=method
                    )
    return rows
