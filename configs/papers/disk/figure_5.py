"""Configures DiSK, Figure 5: fine-tuning ViT-small on CIFAR-100 at several ε.

Names are eps-E/METHOD, with the ε of Table 6. `--pretrained` is a ViT-small on 16x16 patches of
224x224 images in the format of `transformers`.

The rate decays by cosine without warm-up, because C.1 uses warm-up for random initial weights only.
The paper does not state the other hyper-parameters. Here: ten epochs of Adam at η = 5e-4, κ = 0.7,
γ = 0.5, and batches and clipping as in training from scratch.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Disk


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns DPAdam, and DiSK on it; all weights are trained."""
    base = base_configs()["cifar100"]
    base = dataclasses.replace(
        base,
        model="vit_small_published",
        steps=100,
        microbatch_size=20,
        learning_rate=5e-4,
        schedule="cosine",
    )
    return {
        f"eps-{epsilon:g}/{name}": dataclasses.replace(base, epsilon=epsilon, method=method)
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)
        for name, method in (("dp_adam", DPSGD()), ("kf_dp_adam", Disk(kappa=0.7, gamma=0.5)))
    }
