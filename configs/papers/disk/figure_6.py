"""Configures DiSK, Figure 6(b): comparison with DOPPLER, DP-FTRL and the base.

The setting is WRN-16-4 on CIFAR-10. Names are eps-E/METHOD. The paper gives the values of ε on the
axis of the figure only. Here they are those of Table 6. `python -m experiments study
noisy-regression` computes Figure 6(a).

DOPPLER follows C.3 and section 3.3: DiSK with the gradient at one point. That is the first-order
filter with b = κ = 0.7 and a = -(1 - κ) = -0.3, which is not a filter of DOPPLER's tables. In its
first steps it corrects the bias as DOPPLER does, whereas DiSK starts from the first gradient.

For DP-FTRL the paper gives two references only. Kairouz et al. (2021) use tree aggregation with
batches in a fixed order. Choquette-Choo et al. (2024) correlate noise by a Toeplitz matrix. Here it
is of the second kind, with the banded Toeplitz matrix that minimizes the error of the gradients'
sums:

- `dp_ftrl`: a fixed order, ten bands, ten groups of 5000, no amplification by sampling.
- `dp_ftrl_sampled`: four bands, Poisson samples of four groups in turn.

No run uses a tree. The optimizer after the noise is that of the other rows, Adam with its schedule,
for which the matrix is not optimal. ε is for replacing an example by one that adds zero.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, CorrelatedNoise, Disk, Doppler


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the base optimizer, DOPPLER, DP-FTRL and DiSK."""
    base = base_configs()["cifar10"]
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
