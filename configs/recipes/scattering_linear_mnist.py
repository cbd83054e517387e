"""A linear model on scattering features of MNIST (Tramèr and Boneh, 2021)."""

from dpoptax.training.config import TrainConfig


def get_config() -> TrainConfig:
    """B = 4096, 300 steps, C = 0.1, η = 32, group normalisation of each example, ε = 1."""
    return TrainConfig(
        dataset="mnist",
        features="scattering",
        model="linear",
        steps=300,
        batch_size=4096,
        learning_rate=32.0,
        l2_clip_norm=0.1,
        epsilon=1.0,
        delta=1e-5,
        eval_every=50,
    )
