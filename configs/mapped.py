"""Configures scaled gradients on the digits; `FILE:NAME` selects one config."""

import dataclasses

from dpoptax.training import TrainConfig
from dpoptax.training.methods import DPSGD
from experiments.methods import ScaleThenPrivatize

SCALES = {
    "entry": ScaleThenPrivatize(each="entry"),
    "side": ScaleThenPrivatize(each="side"),
    "leaf": ScaleThenPrivatize(each="leaf"),
}


def get_configs() -> dict[str, TrainConfig]:
    """Returns DP-SGD and each kind of scale; two kinds correct for the noise variance."""
    momentum = TrainConfig(method=DPSGD(), optimizer="momentum", learning_rate=0.15)
    adam = TrainConfig(method=DPSGD(), optimizer="adam", learning_rate=0.02)
    found = {"momentum": momentum, "adam": adam}
    for name, method in SCALES.items():
        found[f"{name}_momentum"] = dataclasses.replace(momentum, method=method)
        found[f"{name}_adam"] = dataclasses.replace(adam, method=method)
    for name in ("side", "leaf"):
        corrected = dataclasses.replace(SCALES[name], noise_corrected=True)
        found[f"{name}_corrected_adam"] = dataclasses.replace(adam, method=corrected)
    return found
