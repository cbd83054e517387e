r"""A linear model on a dictionary of patches that no data had a part in (Coates and Ng, 2011).

In the shape of DP-RandP (Tang et al., 2023), who report 72.3 % at ε = 1, δ = 1e-5: a representation
of images that a random process draws costs no privacy. They train a WRN-16-4 on images of random
StyleGANs, contrastively, and then its last layer, and all of it, on the private data. Here patches
of dead leaves are the dictionary of Coates and Ng's pipeline, and the linear model behind it is all
that is trained. No publication has this recipe. Batch, clip and steps are those of
scattering_linear_cifar10, which has 65.5 % at ε = 3 and 61.7 % at ε = 1; patch, grid, number of
filters, threshold and process were chosen on held-out training data, 15,000 images of it.

Measured on images decoded from JPEG, five seeds, the rate one of three by a trial on held-out
training data: 70.75 ± 0.12 % at ε = 3 (η = 8) and 67.75 ± 0.26 % at ε = 1 (η = 4, with factors
0.5 1 2), by

    dpoptax compare configs/recipes/dictionary_linear_cifar10.py --epsilon 3 --factors 1 2 4 \
      --trial-seeds 1 --data-dir DIR --workdir runs/cifar10
"""

from experiments.config import ExperimentConfig


def get_config() -> ExperimentConfig:
    """B = 8192, C = 0.1, momentum 0.9, 120 steps as for scattering."""
    return ExperimentConfig(
        dataset="cifar10",
        features="dictionary",
        model="linear",
        steps=120,
        batch_size=8192,
        optimizer="momentum",
        learning_rate=4.0,
        l2_clip_norm=0.1,
        epsilon=3.0,
        delta=1e-5,
        eval_every=50,
    )
