"""DOPPLER, Figure 2: spectra in the training of ResNet-50 on CIFAR-10, 40 epochs in 4000 steps.

The figure shows the noise w_t and the stochastic gradients g_t of SGD, and those of LP-SGD. They
are private, and nothing here writes them. `python -m experiments spectrum FILE:NAME --output DIR`
records a thousand coordinates of what is released, gradient and noise together, before and behind
the filter, and draws their spectra. Privacy is not stated for this figure, so that ε = 8 is
assumed. The steps make B = 500.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import load_configs
from dpoptax.training.methods import DPSGD, Doppler
from experiments.config import ExperimentConfig


def get_configs() -> dict[str, ExperimentConfig]:
    """Without and with the first-order filter of Table 2."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    base = dataclasses.replace(base, model="resnet_50", steps=4000, batch_size=500)
    return {
        name: dataclasses.replace(base, method=method)
        for name, method in (("dp_sgd", DPSGD()), ("lp_dp_sgd", Doppler()))
    }
