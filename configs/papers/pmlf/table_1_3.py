"""DP-PMLF, Tables 1 (ViT) and 3 (ResNet-18), Figure 4 at ε of 1 and 8 (5-layer CNN): four methods.

Names are DATASET/eps-E/MODEL/METHOD. Not stated and assumed: LP-DPSGD's filter, here the one that
DP-PMLF has on the data set; InnerOuter's momenta, here 0.1 over two iterates and 0.9; the size of
the ViT, here width 64 and depth 4.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import load_configs
from dpoptax.training.methods import DPSGD, PMLF, Doppler
from experiments.config import ExperimentConfig
from experiments.methods import InnerOuter

MODELS = {"vit": "vit_tiny", "resnet": "resnet_18", "cnn": "cnn_5"}


def get_configs() -> dict[str, ExperimentConfig]:
    """β = 0.1, k = 2; a = -0.9 with b = 0.1 on grey images, b = (0.15, -0.05) on CIFAR."""
    rows = {}
    for dataset, base in load_configs(Path(__file__).with_name("base.py")).items():
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
