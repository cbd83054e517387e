"""DOPPLER's experiments on images: what its figures share on each data set."""

from experiments.config import ExperimentConfig

SIZES = {"mnist": 60_000, "cifar10": 50_000, "cifar100": 50_000}


def get_configs() -> dict[str, ExperimentConfig]:
    """ε = 8 (Figures 3 and 7), δ = 1/N^1.1 (section 6.1), 80 epochs, B = 1000, η = 0.5.

    Table 1 states grids only: epochs 50, 80, 120, 150; B 500, 1000, 2000, 5000 on CIFAR; η 0.8,
    0.5, 0.4, 0.2, 0.1. The values here are from inside them; `dpoptax compare --learning-rates 0.8
    0.5 0.4 0.2 0.1` searches the last.

    Not stated and assumed: automatic clipping of all layers as one, AUTO-S, at C = 1, which Figure
    9 finds the best; the 5-layer CNN in all figures but 7(a), its kernels and widths; B on MNIST.
    Most results of the paper are of one run (its checklist).
    """
    return {
        dataset: ExperimentConfig(
            dataset=dataset,
            model="cnn_5",
            steps=80 * size // 1000,
            batch_size=1000,
            microbatch_size=100,
            learning_rate=0.5,
            clip="auto_s",
            epsilon=8.0,
            delta=size**-1.1,
            eval_every=100,
        )
        for dataset, size in SIZES.items()
    }
