r"""The methods on one recipe: a linear model on scattering features. Names are DATASET/METHOD.

    dpoptax compare "configs/benchmark/scattering_linear.py:mnist/*" --epsilon 1 --steps 30 \
      --factors 0.25 0.5 1 2 4 --trial-seeds 1 --data-dir DIR --workdir runs/mnist-1-30 \
      --records docs/benchmark/linear.jsonl

Each method has its paper's hyper-parameters, and a rate that `--factors` multiplies: those of SGD,
a tenth where momentum adds up ten gradients, and Adam's. B = 4096 and C = 0.1 as in the recipe.
"""

import dataclasses

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import (
    DPSGD,
    PMLF,
    AdamBC,
    AdaptiveKalman,
    CorrelatedNoise,
    Disk,
    Doppler,
    GeoDP,
    InnerOuter,
    LPAdam,
    Method,
    NonPrivate,
)

METHODS: dict[str, tuple[Method, float, dict[str, str]]] = {
    "dp_sgd": (DPSGD(), 128.0, {}),
    "momentum": (DPSGD(), 12.8, {"optimizer": "momentum"}),
    "doppler": (Doppler(), 128.0, {}),
    "disk": (Disk(kappa=0.7, gamma=0.5), 128.0, {}),
    "disk_one_gradient": (Disk(kappa=0.3, gamma=None), 128.0, {}),
    "pmlf": (PMLF(), 128.0, {}),
    "inner_outer": (InnerOuter(), 12.8, {}),
    "adaptive_kalman": (AdaptiveKalman(), 128.0, {}),
    "lp_adam": (LPAdam(), 0.02, {}),
    "adam_bc": (AdamBC(), 0.02, {}),
    "correlated": (CorrelatedNoise(), 128.0, {"sampling": "cyclic"}),
    "correlated_filtered": (CorrelatedNoise(preset="momentum"), 128.0, {"sampling": "cyclic"}),
    "geodp": (GeoDP(), 128.0, {}),
    "non_private": (NonPrivate(), 4.0, {}),
}
"""Method, rate, and what else it needs."""


def get_configs() -> dict[str, TrainConfig]:
    """Evaluated at the end alone."""
    base = TrainConfig(
        features="scattering",
        model="linear",
        steps=30,
        batch_size=4096,
        l2_clip_norm=0.1,
        epsilon=1.0,
        delta=1e-5,
        eval_every=1000,
    )
    return {
        f"{dataset}/{name}": dataclasses.replace(
            base, dataset=dataset, method=method, learning_rate=rate, **needs
        )
        for dataset in ("mnist", "cifar10")
        for name, (method, rate, needs) in METHODS.items()
    }
