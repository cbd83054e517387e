"""Correlated noise with examples drawn by chance, on the digits: `FILE:NAME` is one of them."""

import dataclasses

from dpoptax.training.config import TrainConfig
from dpoptax.training.methods import CorrelatedNoise


def get_configs() -> dict[str, TrainConfig]:
    """In groups that take turns, and two ways that Monte Carlo prices; a low-pass behind each."""
    turns = TrainConfig(
        method=CorrelatedNoise(preset="momentum"), learning_rate=1.5, sampling="cyclic"
    )
    drawn = dataclasses.replace(turns, accountant="monte_carlo")
    return {
        "turns": turns,
        "balls_in_bins": dataclasses.replace(drawn, sampling="balls_in_bins"),
        "min_separation": dataclasses.replace(drawn, sampling="min_separation"),
    }
