"""Configures a tanh CNN on CIFAR-10 with full batches (Dörmann et al., 2021).

The authors report 58.6, 66.4 and 70.1 % at ε = 1.93, 4.21 and 7.42. With full batches, privacy
noise replaces sampling noise, so accounting covers a larger part of all the noise. This config
shares only the full batches with their work. The network is that of Papernot et al. (2021);
clipping bound, learning rate and number of steps are assumed. We did not train it. It takes 1.17e15
operations according to

    dpoptax plan configs/recipes/all_batch_cifar10.py
"""

from dpoptax.training import Task
from experiments.config import ExperimentConfig

RUN = ExperimentConfig(
    dataset="cifar10",
    model="tanh_cnn",
    steps=100,
    batch_size=50_000,
    microbatch_size=200,
    optimizer="momentum",
    learning_rate=4.0,
    l2_clip_norm=0.1,
    epsilon=4.21,
    delta=1e-5,
    eval_every=25,
)


def all_batch_cifar10(run: ExperimentConfig = RUN) -> Task:
    """Returns B = N = 50,000 and 100 steps; C = 0.1, η = 4, momentum 0.9 are assumed."""
    return run.task()
