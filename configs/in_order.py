"""Batches in a fixed order, without amplification, on the handwritten digits: `FILE:NAME` is one.

68 steps of 64 are four passes over the four fifths of the examples that trials train on, and no
more than four over all of them.
"""

import dataclasses

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import DPSGD, CorrelatedNoise, Doppler


def get_configs() -> dict[str, TrainConfig]:
    """DP-SGD and noise that is correlated over a pass; `drawn`: DP-SGD on Poisson samples."""
    base = TrainConfig(
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
