r"""Compares DP-PMLF with DP-SGD on the network and hyper-parameters of its paper.

    dpoptax compare configs/benchmark/pmlf_cnn.py --epsilon 1 --seeds 1 --factors 1 \
      --data-dir DIR --workdir runs/pmlf-cnn
    python -m experiments record runs/pmlf-cnn \
      --output experiments/results/on-images/pmlf-cnn-mnist.jsonl

The setting is that of `configs/papers/pmlf/table_1_3.py`: the 5-layer CNN on MNIST, 1,500 steps,
B = 1,000, C = 1, η = 0.5, δ = 1/N. That file cites the places in the paper and lists the
assumptions. DP-SGD also runs at half, twice and four times this learning rate.
"""

import dataclasses
from pathlib import Path

from experiments.config import ExperimentConfig, load_experiments

PAPER = Path(__file__).parents[1] / "papers" / "pmlf" / "table_1_3.py"
RATES = 0.25, 1.0, 2.0


def get_configs() -> dict[str, ExperimentConfig]:
    """Returns the configs, with the fastest micro-batches on two cores."""
    published = load_experiments(PAPER)
    configs = {
        f"mnist/{method}_as_published": dataclasses.replace(
            published[f"mnist/eps-1/cnn/{method}"], eval_every=2000, microbatch_size=20
        )
        for method in ("dp_sgd", "pmlf")
    }
    baseline = configs["mnist/dp_sgd_as_published"]
    return configs | {
        f"mnist/dp_sgd_rate_{rate:g}": dataclasses.replace(baseline, learning_rate=rate)
        for rate in RATES
    }
