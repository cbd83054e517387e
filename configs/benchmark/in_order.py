r"""Data that come in a fixed order, or once: no batch is drawn, and nothing amplifies.

    dpoptax compare "configs/benchmark/in_order.py:mnist/*" --epsilon 1 --trial-seeds 1 \
      --data-dir DIR --workdir runs/mnist-1-46
    python -m experiments record runs/mnist-1-46 \
      --output experiments/results/on-images/in-order-mnist.jsonl

A linear model on scattering features, C = 0.1 and B = 1024 as in `scattering_linear.py`. 46 steps
are one pass over the four fifths of MNIST that trials train on (39 of CIFAR-10), so that no example
is seen twice in any run; `--steps 230` are five of these passes (195). DP-SGD is alone, with
heavy-ball momentum and with its low-pass filter; noise that is correlated over all steps of a pass
likewise.
"""

import dataclasses

from dpoptax.training.methods import DPSGD, CorrelatedNoise, Doppler, Method
from experiments.config import ExperimentConfig

STEPS = {"mnist": 46, "cifar10": 39}
"""One pass over the four fifths of the training examples that trials see."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Evaluated at the end alone; names are DATASET/METHOD."""
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
