"""DOPPLER, Figure 4: SGD, AdamBC and GaLore with and without the filter, 5-layer CNN on CIFAR-10.

Names are OPTIMIZER/eps-E/METHOD. The panels' ε are to be read off their axes only; here 1, 2, 4 and
8. Learning rates: 0.5 and, for Adam, the 1e-3 that Figure 10 finds best. Panel (b) is DPAdam in
the caption and DPAdamBC in section 6.2, which is here. Without the filter, Adam has its own
momentum of 0.9. GaLore's rank is not stated, here 16; it projects matrices, that is the last layer
of this model, which is not stated either.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import load_configs
from dpoptax.training.methods import DPSGD, Doppler, LPAdam
from experiments.config import ExperimentConfig

FILTER = "doppler-first-order-1"
PANELS = {
    "sgd": (0.5, DPSGD(), Doppler(FILTER)),
    "adam_bc": (
        1e-3,
        LPAdam("momentum", noise_corrected=True),
        LPAdam(FILTER, noise_corrected=True),
    ),
    "galore": (1e-3, LPAdam("momentum", rank=16), LPAdam(FILTER, rank=16)),
}


def get_configs() -> dict[str, ExperimentConfig]:
    """Three optimizers, four ε, without and with the first-order filter of Table 2."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    return {
        f"{panel}/eps-{epsilon:g}/{name}": dataclasses.replace(
            base, method=method, learning_rate=rate, epsilon=epsilon
        )
        for panel, (rate, *methods) in PANELS.items()
        for epsilon in (1.0, 2.0, 4.0, 8.0)
        for name, method in zip(("dp", "lp_dp"), methods, strict=True)
    }
