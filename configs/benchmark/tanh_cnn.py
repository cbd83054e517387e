r"""Compares methods on a network that learns features: a small tanh CNN on MNIST.

    dpoptax compare "configs/benchmark/tanh_cnn.py:mnist/*" --epsilon 1 --seeds 3 --trial-seeds 1 \
      --data-dir DIR --workdir runs/cnn-mnist-1
    python -m experiments record runs/cnn-mnist-1 \
      --output experiments/results/on-images/cnn-mnist.jsonl

The model and C = 0.1 are those of the recipe, `configs/recipes/tanh_cnn_mnist.py`. The methods are
eight of `scattering_linear.py`. All except DP-PMLF take one gradient per example. The grid is based
on a pilot run of DP-SGD with learning rates from 2 to 32, where the largest was best.
"""

import dataclasses

from experiments.config import ExperimentConfig
from experiments.methods import (
    DPSGD,
    PMLF,
    AdaptiveKalman,
    CorrelatedNoise,
    Disk,
    Doppler,
    LPAdam,
    Method,
)

METHODS: dict[str, tuple[Method, float, dict[str, str]]] = {
    "dp_sgd": (DPSGD(), 32.0, {}),
    "momentum": (DPSGD(), 3.2, {"optimizer": "momentum"}),
    "doppler": (Doppler(), 32.0, {}),
    "disk_one_gradient": (Disk(kappa=0.3, gamma=None), 32.0, {}),
    "adaptive_kalman": (AdaptiveKalman(), 32.0, {}),
    "lp_adam": (LPAdam(), 0.004, {}),
    "correlated_filtered": (CorrelatedNoise(preset="momentum"), 32.0, {"sampling": "cyclic"}),
    "pmlf": (PMLF(), 32.0, {}),
}
"""Method, learning rate, and other fields of the config."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the configs, which evaluate at the end only."""
    base = ExperimentConfig(
        dataset="mnist",
        model="tanh_cnn_mnist",
        steps=240,
        batch_size=512,
        l2_clip_norm=0.1,
        epsilon=1.0,
        delta=1e-5,
        eval_every=1000,
    )
    return {
        f"mnist/{name}": dataclasses.replace(base, method=method, learning_rate=rate, **needs)
        for name, (method, rate, needs) in METHODS.items()
    }
