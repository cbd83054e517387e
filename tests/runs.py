"""A run of a few seconds for tests of interruptions, and arrays on disk."""

import numpy as np

from dpoptax.training import config_of
from experiments.config import ExperimentConfig
from experiments.methods import Disk

CONFIG = config_of(
    ExperimentConfig(
        method=Disk(),
        steps=6,
        eval_every=2,
        checkpoint_every=2,
        batch_size=32,
        model="linear",
        noise_multiplier=1.0,
        epsilon=None,
        accountant="rdp",
        seed=0,
    )
)


def memory_mapped(folder):
    """Returns the memory-mapped arrays of all `.npy` files of a folder, by file name."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
