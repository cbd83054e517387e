"""Configures random batches with independent and correlated noise on the digits.

`FILE:SAMPLER/METHOD` selects one config. Batch size and steps are those of `configs/in_order.py`,
which runs the same methods on batches in a fixed order.
"""

import dataclasses

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, CorrelatedNoise


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns DP-SGD on two kinds of random batches, and correlated noise on groups in turns."""
    base = ExperimentConfig(method=DPSGD(), batch_size=64, steps=68, learning_rate=1.0)
    momentum = dataclasses.replace(base, optimizer="momentum", learning_rate=0.1)
    independent = {"dp_sgd": base, "momentum": momentum}
    correlated = {
        "correlated": dataclasses.replace(base, method=CorrelatedNoise()),
        "correlated_momentum": dataclasses.replace(momentum, method=CorrelatedNoise()),
        "correlated_filtered": dataclasses.replace(base, method=CorrelatedNoise(preset="momentum")),
    }
    drawn = {"poisson": independent, "balls_in_bins": independent, "cyclic": correlated}
    return {
        f"{sampling}/{name}": dataclasses.replace(config, sampling=sampling)
        for sampling, methods in drawn.items()
        for name, config in methods.items()
    }
