"""DiSK, Figure 6(b): DiSK against DOPPLER, DP-FTRL and the base optimizer, WRN-16-4 on CIFAR-10.

Names are eps-E/METHOD. The ε are on the figure's axis alone: here those of Table 6. Figure 6(a) is
`python -m experiments study noisy-regression`.

DOPPLER is here what C.3 and section 3.3 say: DiSK with the gradient at one point, that is the
filter of first order with b = κ = 0.7 and a = -(1 - κ) = -0.3, and not one of DOPPLER's own tables.
Its first steps have DOPPLER's correction of the bias where DiSK begins at the first gradient.

Of DP-FTRL the paper says no more than two references: Kairouz et al. (2021), tree aggregation with
batches in a fixed order, and Choquette-Choo et al. (2024), noise correlated by a Toeplitz matrix.
Here it is the latter's kind, the banded Toeplitz matrix of least error in the gradients' sums:
`dp_ftrl` in a fixed order, ten bands and ten groups of 5000, no amplification by sampling;
`dp_ftrl_sampled` with four bands and Poisson samples of four groups in turns. There is no tree, the
optimizer behind the noise is the other rows', Adam with its schedule, for which the matrix is not
optimal, and ε is that of replacing an example by one that adds zero.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import load_configs
from dpoptax.training.methods import DPSGD, CorrelatedNoise, Disk, Doppler
from experiments.config import ExperimentConfig


def get_configs() -> dict[str, ExperimentConfig]:
    """The base optimizer, DOPPLER, DP-FTRL and DiSK."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    methods = {
        "base": DPSGD(),
        "doppler": Doppler(b=(0.7,), a=(-0.3,)),
        "dp_ftrl": CorrelatedNoise(bands=10),
        "dp_ftrl_sampled": CorrelatedNoise(bands=4),
        "disk": Disk(kappa=0.7, gamma=0.5),
    }
    return {
        f"eps-{epsilon:g}/{name}": dataclasses.replace(
            base,
            model="wrn_16_4",
            epsilon=epsilon,
            method=method,
            sampling="cyclic" if isinstance(method, CorrelatedNoise) else base.sampling,
        )
        for epsilon in (0.5, 1.0, 2.0, 4.0, 8.0)
        for name, method in methods.items()
    }
