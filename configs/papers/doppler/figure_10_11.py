"""DOPPLER, Figures 10 (learning rates of LP-DPAdamBC) and 11 (LP-DPSGD's schedule), 150 epochs.

ε = 8, δ = 1/N^1.1 and 150 epochs are stated for Figure 10 and assumed for 11, the 5-layer CNN for
both; the rates are the grid of Table 1.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import load_configs
from dpoptax.training.methods import Doppler, LPAdam
from experiments.config import ExperimentConfig


def get_configs() -> dict[str, ExperimentConfig]:
    """Figure 10 by learning rate, Figure 11 without and with warm-up and cosine decay."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    base = dataclasses.replace(base, steps=150 * 50)
    adam = LPAdam("doppler-first-order-1", noise_corrected=True)
    rates = {
        f"learning_rate/{rate:g}": dataclasses.replace(base, method=adam, learning_rate=rate)
        for rate in (3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
    }
    schedules = {
        f"schedule/{schedule}": dataclasses.replace(base, method=Doppler(), schedule=schedule)
        for schedule in ("constant", "warmup_cosine")
    }
    return rates | schedules
