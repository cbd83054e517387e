r"""Compares sampling and signs of releases.

Model, batch size and steps are those of `scattering_linear.py`. DP-SGD with three optimizers is the
baseline:

    dpoptax compare configs/benchmark/before_and_behind.py --epsilon 1 --trial-seeds 1 \
      --data-dir DIR --workdir runs/before-mnist-1
    python -m experiments record runs/before-mnist-1 \
      --output experiments/results/before-and-behind/linear-mnist.jsonl

For methods without a learning rate in `scattering_linear.py`, the rate is the best of five that
differ by factors of four. One trial each on held-out training data selected it. The runs at ε = 3
and 8 use `--factors 0.25 0.5 1 2 4 8`.

Scaling before the clip was measured with the config of commit 7025d906, the last one that has it.
Shrinkage and Muon were measured with that of commit c6d0562f.
"""

import dataclasses
from typing import Any

from scattering_linear import get_configs as linear_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Method, SignSGD

BINS = {"sampling": "balls_in_bins"}
MOMENTUM = {"optimizer": "momentum"}
ADAM = {"optimizer": "adam"}

METHODS: dict[str, tuple[Method, float, dict[str, Any]]] = {
    "dp_sgd": (DPSGD(), 32.0, {}),
    "momentum": (DPSGD(), 3.2, MOMENTUM),
    "adam": (DPSGD(), 0.005, ADAM),
    "balls_in_bins": (DPSGD(), 32.0, BINS),
    "balls_in_bins_momentum": (DPSGD(), 3.2, BINS | MOMENTUM),
    "sign_momentum": (SignSGD(decay=0.9), 0.002, {}),
}
"""Method, learning rate, and other fields of the config."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the configs, which evaluate at the end only."""
    base = linear_configs()["mnist/dp_sgd"]
    return {
        f"mnist/{name}": dataclasses.replace(base, method=method, learning_rate=rate, **needs)
        for name, (method, rate, needs) in METHODS.items()
    }
