"""DOPPLER, Figure 2: spectra of the gradients of ResNet-50 on CIFAR-10, 40 epochs in 4000 steps.

The paper records private and stochastic gradients; here those that are released, of which
recording.npz keeps a thousand coordinates and spectrum.png shows the spectra. Its ε is not stated.
"""

import dataclasses
from pathlib import Path

from dpoptax.training.config import TrainConfig, load_configs
from dpoptax.training.methods import DPSGD, Doppler


def get_configs() -> dict[str, TrainConfig]:
    """Without and with the first-order filter of Table 2."""
    base = load_configs(f"{Path(__file__).with_name('base.py')}:cifar10")["cifar10"]
    base = dataclasses.replace(base, model="resnet_50", steps=4000, batch_size=500, record=1000)
    return {
        name: dataclasses.replace(base, method=method)
        for name, method in (("dp_sgd", DPSGD()), ("lp_dp_sgd", Doppler()))
    }
