"""Configures user-level privacy on digits: ε protects a writer with all images.

scikit-learn does not record the writers of the digits. Here a rule makes up a few dozen writers.
The run shows how to set up user-level privacy, and its accuracy has no meaning.
"""

import dataclasses

import numpy as np

from dpoptax.training import TrainConfig
from dpoptax.training.data import Dataset, load_dataset, register_dataset


@register_dataset
def digits_of_made_up_writers() -> Dataset:
    """Returns the digits, each owned by a made-up writer."""
    digits = load_dataset("digits")
    writers = np.arange(digits.train_size) ** 2 % 101 % 45
    return dataclasses.replace(digits, name="digits_of_made_up_writers", owners=writers)


def get_config() -> TrainConfig:
    """Returns the config of the run."""
    return TrainConfig(
        dataset="digits_of_made_up_writers",
        records_per_user=16,
        batch_size=20,
        steps=60,
        epsilon=8.0,
        delta=1e-4,
    )
