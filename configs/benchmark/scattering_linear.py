r"""Compares all methods on a linear model on scattering features.

Names are DATASET/METHOD.

    dpoptax compare "configs/benchmark/scattering_linear.py:mnist/*" --epsilon 1 --trial-seeds 1 \
      --data-dir DIR --workdir runs/mnist-1-120
    python -m experiments record runs/mnist-1-120 \
      --output experiments/results/on-images/linear-mnist.jsonl

Each method has the hyper-parameters of its paper. DiSK also runs in its one-gradient form at
κ = 0.3. `--factors` multiplies the learning rate: that of SGD, a tenth of it for momentum, which
adds up ten gradients, or that of Adam. C = 0.1 is the bound of the recipe. B = 1024 and 120 steps
take a tenth of the recipe's gradients, which leaves time for many methods.

With `--steps 30` and `--steps 10` the factors were 0.0625 0.125 0.25 0.5 1 2 4 8. On CIFAR-10 at
ε = 1, the grids of Adam and of non-private training continued below 0.25 by halves to 0.015625. At
ε = 3 and 8 the factors for Adam were 0.03125 0.0625 0.125 0.25 0.5.

Dictionary features use the factors 0.125 0.25 0.5 1 2 4, and Adam 0.015625 0.03125 0.0625 0.125
0.25 0.5:

    dpoptax compare "configs/benchmark/scattering_linear.py:cifar10/*" --set features=dictionary \
      --epsilon 3 --factors 0.125 0.25 0.5 1 2 4 --trial-seeds 1 --data-dir DIR \
      --workdir runs/dictionary-3
    python -m experiments record runs/dictionary-3 \
      --output experiments/results/on-images/dictionary-cifar10.jsonl
"""

import dataclasses

from experiments.config import ExperimentConfig
from experiments.methods import (
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
    "dp_sgd": (DPSGD(), 32.0, {}),
    "momentum": (DPSGD(), 3.2, {"optimizer": "momentum"}),
    "doppler": (Doppler(), 32.0, {}),
    "disk": (Disk(kappa=0.7, gamma=0.5), 32.0, {}),
    "disk_one_gradient": (Disk(kappa=0.3, gamma=None), 32.0, {}),
    "pmlf": (PMLF(), 32.0, {}),
    "inner_outer": (InnerOuter(), 3.2, {}),
    "adaptive_kalman": (AdaptiveKalman(), 32.0, {}),
    "lp_adam": (LPAdam(), 0.01, {}),
    "adam_bc": (AdamBC(), 0.01, {}),
    "correlated": (CorrelatedNoise(), 32.0, {"sampling": "cyclic"}),
    "correlated_filtered": (CorrelatedNoise(preset="momentum"), 32.0, {"sampling": "cyclic"}),
    "geodp": (GeoDP(), 32.0, {}),
    "non_private": (NonPrivate(), 0.05, {}),
}
"""Method, learning rate, and other fields of the config."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the configs, which evaluate at the end only."""
    base = ExperimentConfig(
        features="scattering",
        model="linear",
        steps=120,
        batch_size=1024,
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
