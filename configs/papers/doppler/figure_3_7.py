"""Configures DOPPLER, Figures 3 (data sets) and 7 (models on CIFAR-10) at ε = 8.

Names are DATASET/MODEL/METHOD, for DPSGD and LP-DPSGD. The filter is the first of the two
first-order filters of Table 2. Not stated, and assumed: the model of Figure 3, here the 5-layer CNN
of Figure 7(a). The EfficientNet of Figure 7 is left out.
"""

import dataclasses

from base import get_configs as base_configs

from experiments.config import ExperimentConfig
from experiments.methods import DPSGD, Doppler


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns configs with and without the filter."""
    rows = {}
    for dataset, base in base_configs().items():
        models = ["cnn_5", "vit_small", "resnet_50"] if dataset == "cifar10" else ["cnn_5"]
        for model in models:
            for name, method in (("dp_sgd", DPSGD()), ("lp_dp_sgd", Doppler())):
                rows[f"{dataset}/{model}/{name}"] = dataclasses.replace(
                    base, model=model, method=method
                )
    return rows
