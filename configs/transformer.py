r"""Configures a small vision transformer on digits; `FILE:NAME` selects one run.

    dpoptax compare "configs/transformer.py:drawn/*" --trial-seeds 1 \
      --factors 0.125 0.25 0.5 1 2 4 --workdir runs/transformer

    dpoptax compare "configs/transformer.py:in_order/*" --trial-seeds 1 \
      --factors 0.015625 0.03125 0.0625 0.125 0.25 0.5 1 2 --workdir runs/transformer-in-order

The model has two blocks of width 32 on 16 patches of 2x2 and a class token: 26,538 parameters.
Batches are random (`drawn/*`), or groups of 64 in turn (`in_order/*`). Trials train on four fifths
of the examples. 272 steps are 16 passes over these, and at most 13 passes over all examples.
Hyper-parameters are each method's defaults; `--factors` multiplies the learning rate. Muon was
measured with the config of commit c6d0562f, the last one that has it.
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
    LPAdam,
    Method,
    NonPrivate,
)

RATES = {"sgd": 2.0, "momentum": 0.2, "adam": 0.005}
"""Learning rates, which `--factors` multiplies, by optimizer."""

BANDS = 17
"""Steps of a pass over the four fifths. An example takes part once in that time."""

DRAWN: dict[str, tuple[Method, str]] = {
    "dp_sgd": (DPSGD(), "sgd"),
    "momentum": (DPSGD(), "momentum"),
    "adam": (DPSGD(), "adam"),
    "doppler": (Doppler(), "sgd"),
    "disk": (Disk(kappa=0.7, gamma=None), "sgd"),
    "pmlf": (PMLF(), "sgd"),
    "adaptive_kalman": (AdaptiveKalman(), "sgd"),
    "lp_adam": (LPAdam(), "adam"),
    "adam_bc": (AdamBC(), "adam"),
    "non_private": (NonPrivate(), "adam"),
}
"""Methods for random batches, and the key of each method's learning rate."""

IN_ORDER: dict[str, tuple[Method, str]] = {
    "momentum": (DPSGD(), "momentum"),
    "adam": (DPSGD(), "adam"),
    "correlated_momentum": (CorrelatedNoise(bands=BANDS), "momentum"),
    "correlated_filtered": (CorrelatedNoise(preset="momentum", bands=BANDS), "sgd"),
    "correlated_adam": (CorrelatedNoise(bands=BANDS), "adam"),
    "non_private": (NonPrivate(), "adam"),
}
"""Methods for batches in turn, and the key of each method's learning rate."""


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns all runs of both tables, at ε = 3."""
    drawn = ExperimentConfig(model="transformer", steps=120, batch_size=256, microbatch_size=64)
    in_order = ExperimentConfig(model="transformer", steps=272, batch_size=64, sampling="in_order")
    tables = (("drawn", drawn, DRAWN), ("in_order", in_order, IN_ORDER))
    return {
        f"{table}/{name}": dataclasses.replace(
            base,
            method=method,
            optimizer=optimizer,
            learning_rate=RATES[optimizer],
        )
        for table, base, rows in tables
        for name, (method, optimizer) in rows.items()
    }
