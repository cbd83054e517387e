"""Configures DOPPLER, Figure 12: fine-tuning ViT on CIFAR-10 at several ε.

Names are eps-E/METHOD. `--pretrained` is a ViT-small on 16x16 patches of 224x224 images in the
format of `transformers`. The paper does not state the ViT, the values of ε (here 1, 2, 4 and 8), or
the number of epochs (here 10).
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns configs with and without the first-order filter of Table 2."""
    base = base_configs()["cifar10"]
    base = dataclasses.replace(base, model="vit_small_published", steps=500, microbatch_size=20)
    return {
        f"eps-{epsilon:g}/{name}": dataclasses.replace(base, epsilon=epsilon, method=method)
        for epsilon in (1.0, 2.0, 4.0, 8.0)
        for name, method in (("dp_sgd", DPSGD()), ("lp_dp_sgd", Doppler()))
    }
