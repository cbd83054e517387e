"""Configures DOPPLER, Figure 4: three optimizers with and without the filter.

The setting is the 5-layer CNN on CIFAR-10. Names are OPTIMIZER/eps-E/METHOD. The paper gives the
values of ε on the axes only; here they are 1, 2, 4 and 8. The learning rate is 0.5, and for Adam
1e-3, the best in Figure 10. Without the filter, Adam has its own momentum of 0.9.

Panel (b) is DPAdam in the caption and DPAdamBC in section 6.2; here it is DPAdamBC. GaLore's rank
is not stated; here it is 16. GaLore projects matrices, which here is the last layer only. The paper
does not state that either.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler, LPAdam

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
    """Returns three optimizers at four ε, with and without the filter of Table 2."""
    base = base_configs()["cifar10"]
    return {
        f"{panel}/eps-{epsilon:g}/{name}": dataclasses.replace(
            base, method=method, learning_rate=rate, epsilon=epsilon
        )
        for panel, (rate, *methods) in PANELS.items()
        for epsilon in (1.0, 2.0, 4.0, 8.0)
        for name, method in zip(("dp", "lp_dp"), methods, strict=True)
    }
