"""Configures batches in a fixed order on the digits, without amplification.

`FILE:NAME` selects one config. Trials train on four fifths of the examples. 68 steps with batches
of 64 are four passes over these, and at most four passes over all examples.
"""

import dataclasses

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, CorrelatedNoise, Doppler


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns DP-SGD and noise correlated over a pass; `drawn` uses Poisson sampling."""
    base = ExperimentConfig(
        method=DPSGD(), batch_size=64, steps=68, sampling="in_order", learning_rate=1.0
    )
    momentum = dataclasses.replace(base, optimizer="momentum", learning_rate=0.1)
    bands = 17
    return {
        "dp_sgd": base,
        "momentum": momentum,
        "low_pass": dataclasses.replace(base, method=Doppler(preset="momentum")),
        "correlated": dataclasses.replace(base, method=CorrelatedNoise(bands=bands)),
        "correlated_momentum": dataclasses.replace(momentum, method=CorrelatedNoise(bands=bands)),
        "correlated_filtered": dataclasses.replace(
            base, method=CorrelatedNoise(preset="momentum", bands=bands)
        ),
        "drawn_momentum": dataclasses.replace(momentum, sampling="poisson"),
    }
