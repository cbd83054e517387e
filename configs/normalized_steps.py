r"""Compares normalized steps with DP-SGD, momentum and Adam.

The data are the digits. The learning rate of each run is constant or decays by cosine. All runs
have the same factors:

    dpoptax compare configs/normalized_steps.py --steps 120 --epsilon 1 --trial-seeds 3 \
      --factors 0.125 0.25 0.5 1 2 4 8 16 32 64 --workdir runs/normalized-120
    python -m experiments record runs/normalized-120 \
      --output experiments/results/released-code/normalized-digits.jsonl

The second setting has `--steps 15 --epsilon 3`. `python -m experiments released-code` compares them
on MNIST and CIFAR-10.

All are tuned alike, and have the ε of DP-SGD: normalization uses releases only.
DP-SAT was measured with the config of commit c6d0562f, the last one that has it.
"""

import dataclasses

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, NormalizedSteps


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the configs; learning rates are centers of the grid."""
    base = ExperimentConfig(method=DPSGD(), learning_rate=1.5)
    mean = NormalizedSteps(decay=0.9)
    constant = {
        "dp_sgd": base,
        "momentum": dataclasses.replace(base, optimizer="momentum", learning_rate=0.2),
        "adam": dataclasses.replace(base, optimizer="adam", learning_rate=0.01),
        "normalized": dataclasses.replace(base, method=NormalizedSteps(), learning_rate=0.2),
        "normalized_mean": dataclasses.replace(base, method=mean, learning_rate=0.2),
    }
    cosine = {
        f"{name}_cosine": dataclasses.replace(config, schedule="cosine")
        for name, config in constant.items()
    }
    return constant | cosine
