"""Configures DOPPLER, Figures 8 (filters of Tables 2 and 4) and 9 (clipping).

ε = 8 and the 5-layer CNN on CIFAR-10 are assumed for both figures. The paper defines neither a
layer nor the split of C. Here each array of parameters is a layer, so weights and biases are
separate. All layers have the same bound, C divided by the square root of their number. "Norm" is
automatic clipping, here AUTO-S.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import Doppler

FILTERS = (
    "none",
    "momentum",
    "doppler-first-order-1",
    "doppler-first-order-2",
    "doppler-second-order",
    *(f"doppler-f{row}" for row in range(1, 7)),
)


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns Figure 8 by filter, and Figure 9 by clip, flat and per layer."""
    base = base_configs()["cifar10"]
    filters = {
        f"filter/{name}": dataclasses.replace(base, method=Doppler(preset=name)) for name in FILTERS
    }
    clips = {
        f"clip/{clip}": dataclasses.replace(base, method=Doppler(), clip=clip)
        for clip in ("auto_s", "l2", "auto_s_per_layer", "per_layer")
    }
    return filters | clips
