"""Configures DOPPLER, Figures 10 (LP-DPAdamBC rates) and 11 (LP-DPSGD schedule).

Figure 10 states ε = 8, δ = 1/N^1.1 and 150 epochs, which are assumed for Figure 11. The 5-layer CNN
is assumed for both. The learning rates are the grid of Table 1.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import Doppler, LPAdam


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns Figure 10 by learning rate, and Figure 11 by schedule."""
    base = base_configs()["cifar10"]
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
