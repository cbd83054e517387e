"""A CNN with tanh on CIFAR-10, all examples in every batch (Dörmann et al., 2021).

The authors report 58.6, 66.4 and 70.1 % at ε = 1.93, 4.21 and 7.42: where the noise of privacy
replaces that of sampling, more of all the noise is accounted for. Of theirs this has the sampling
alone: the network is that of Papernot et al. (2021); clip, rate and number of steps are assumed.
Not trained here: 1.17e15 operations by

    dpoptax plan configs/recipes/all_batch_cifar10.py
"""

from experiments.config import ExperimentConfig


def get_config() -> ExperimentConfig:
    """B = N = 50,000, 100 steps; C = 0.1, η = 4 and momentum 0.9 are assumed."""
    return ExperimentConfig(
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
