"""A linear model on scattering features of CIFAR-10 (Tramèr and Boneh, 2021).

The authors report 67.0 % at ε = 3, δ = 1e-5, with features normalised by noisy
statistics of the data set, a part of its ε; here each example's are normalised by themselves.
Measured at ε = 3, one run, seed 0, on images decoded from JPEG: 62.4 % on the test split, by

    dpoptax train configs/recipes/scattering_linear_cifar10.py --data-dir DIR --workdir runs/recipe

The rate is the authors', and not tuned here.
"""

from dpoptax.training.config import TrainConfig


def get_config() -> TrainConfig:
    """B = 8192, 60 epochs, C = 0.1, η = 4, momentum 0.9, as the authors' repository runs it."""
    return TrainConfig(
        dataset="cifar10",
        features="scattering",
        model="linear",
        steps=60 * 50_000 // 8192,
        batch_size=8192,
        optimizer="momentum",
        learning_rate=4.0,
        l2_clip_norm=0.1,
        epsilon=3.0,
        delta=1e-5,
        eval_every=50,
    )
