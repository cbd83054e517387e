"""DiSK, Figure 6(b): DiSK against DOPPLER and the base optimizer, WRN-16-4 on CIFAR-10.

Names are eps-E/METHOD; ε as in Table 6. DP-FTRL, the figure's other baseline, has correlated noise:
`dpoptax.matrix` has its noise and its accounting, a config has not. Figure 6(a) is
`dpoptax.studies.noisy_regression`.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import TrainConfig, load_configs
from dpoptax.training.methods import DPSGD, Disk, Doppler


def get_configs() -> dict[str, TrainConfig]:
    """The base optimizer, DOPPLER and DiSK."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    methods = {"base": DPSGD(), "doppler": Doppler(), "disk": Disk(kappa=0.7, gamma=0.5)}
    return {
        f"eps-{epsilon:g}/{name}": dataclasses.replace(
            base, model="wrn_16_4", epsilon=epsilon, method=method
        )
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)
        for name, method in methods.items()
    }
