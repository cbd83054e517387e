"""DiSK, Figures 2 (MNIST, CIFAR-100, ImageNet) and 4 (three models on CIFAR-10), κ = 0.7, γ = 0.5.

Names are DATASET/MODEL/METHOD. The ε are those that the captions state: 0.5 on MNIST, 8 on
CIFAR-100 and ImageNet, 4 on CIFAR-10.

Section 5.2 names ViT-small on ImageNet, as here, and gives it the accuracy that Table 6 gives to
ResNet-50 (Figure 7); of CIFAR-100 it says 41.8 % where Table 6 says 42.0 %.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import load_configs
from dpoptax.training.methods import DPSGD, Disk
from experiments.config import ExperimentConfig

PANELS = (
    ("mnist", "cnn_5", 0.5),
    ("cifar100", "wrn_16_4", 8.0),
    ("imagenet", "vit_small_16", 8.0),
    ("cifar10", "cnn_5", 4.0),
    ("cifar10", "wrn_16_4", 4.0),
    ("cifar10", "vit_small", 4.0),
)


def get_configs() -> dict[str, ExperimentConfig]:
    """The base optimizer, and DiSK on it."""
    base = load_configs(Path(__file__).with_name("base.py"))
    return {
        f"{dataset}/{model}/{name}": dataclasses.replace(
            base[dataset], model=model, epsilon=epsilon, method=method
        )
        for dataset, model, epsilon in PANELS
        for name, method in (("base", DPSGD()), ("disk", Disk(kappa=0.7, gamma=0.5)))
    }
