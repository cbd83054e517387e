"""Configures DOPPLER, Figure 2: spectra during training of ResNet-50 on CIFAR-10.

Training takes 40 epochs in 4000 steps, so B = 500. The figure shows the noise w_t and the
stochastic gradients g_t of SGD, and those of LP-SGD. Both are private, and no code here writes
them.

`python -m experiments spectrum FILE:NAME --output DIR` draws spectra of the released gradients,
which include the noise. It records a thousand coordinates before and after the filter. The paper
does not state the privacy of this figure; here ε = 8.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns configs with and without the first-order filter of Table 2."""
    base = base_configs()["cifar10"]
    base = dataclasses.replace(base, model="resnet_50", steps=4000, batch_size=500)
    return {
        name: dataclasses.replace(base, method=method)
        for name, method in (("dp_sgd", DPSGD()), ("lp_dp_sgd", Doppler()))
    }
