r"""Compares methods on batches in a fixed order, without amplification.

    dpoptax compare "configs/benchmark/in_order.py:mnist/*" --epsilon 1 --trial-seeds 1 \
      --data-dir DIR --workdir runs/mnist-1-46
    python -m experiments record runs/mnist-1-46 \
      --output experiments/results/on-images/in-order-mnist.jsonl

The model is linear on scattering features, with C = 0.1 and B = 1024 as in `scattering_linear.py`.
Trials train on four fifths of the training examples. One pass over these takes 46 steps on MNIST
and 39 on CIFAR-10, so no run sees an example twice. `--steps 230` (195 on CIFAR-10) makes five
passes.

DP-SGD runs without momentum, with heavy-ball momentum, and with the corresponding low-pass filter.
So does noise that is correlated over all steps of a pass.
"""

import dataclasses

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, CorrelatedNoise, Doppler, Method

STEPS = {"mnist": 46, "cifar10": 39}
"""Steps of one pass over the four fifths of the training examples that trials see."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns DATASET/METHOD configs, which evaluate at the end only."""
    configs = {}
    for dataset, steps in STEPS.items():
        base = ExperimentConfig(
            dataset=dataset,
            features="scattering",
            model="linear",
            steps=steps,
            batch_size=1024,
            l2_clip_norm=0.1,
            sampling="in_order",
            delta=1e-5,
            eval_every=1000,
        )
        methods: dict[str, tuple[Method, float, str]] = {
            "dp_sgd": (DPSGD(), 16.0, "sgd"),
            "momentum": (DPSGD(), 1.6, "momentum"),
            "low_pass": (Doppler(preset="momentum"), 16.0, "sgd"),
            "correlated": (CorrelatedNoise(bands=steps), 16.0, "sgd"),
            "correlated_momentum": (CorrelatedNoise(bands=steps), 1.6, "momentum"),
            "correlated_filtered": (CorrelatedNoise(preset="momentum", bands=steps), 16.0, "sgd"),
        }
        for name, (method, rate, optimizer) in methods.items():
            configs[f"{dataset}/{name}"] = dataclasses.replace(
                base, method=method, learning_rate=rate, optimizer=optimizer
            )
    return configs
