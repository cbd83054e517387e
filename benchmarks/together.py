"""What a run costs that is trained together with others at other learning rates.

`python -m benchmarks together` trains a linear model on made-up features at several rates, in turn
one run after the other and all as one program, as `dpoptax compare` does, and prints the time of a
run. What is compiled is compiled before.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpoptax.training.config import TrainConfig
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.loop import train, train_together
from dpoptax.training.methods import DPSGD, Disk, NonPrivate
from dpoptax.training.run.privacy import make_plan
from dpoptax.training.run.records import markdown_table
from dpoptax.training.search.groups import shared

METHODS = (DPSGD(), Disk(), NonPrivate())


@dataclass
class Together:
    """Times runs that differ in the learning rate alone, together and one by one."""

    model: str = "linear"
    """Name of the model."""
    features: int = 4000
    """Of an example; a model of images gets them as a row of pixels."""
    examples: int = 12_000
    batch_size: int = 4096
    rates: int = 6
    """Number of learning rates."""
    steps: int = 10
    rounds: int = 3
    """A time is the median over so many."""


def main(chosen: Together) -> str:
    """The times of a run of each method, as a table."""
    dataset = made_up(chosen)
    rows = []
    for method in METHODS:
        config = TrainConfig(
            method=method,
            model=chosen.model,
            steps=chosen.steps,
            eval_every=chosen.steps,
            batch_size=chosen.batch_size,
            noise_multiplier=1.0,
            epsilon=None,
            accountant="rdp",
        )
        rates = [2.0**-i for i in range(chosen.rates)]
        found = measure(config, dataset, rates, chosen.rounds)
        ratios = [found["alone"][i] / found["together"][i] for i in range(2)]
        rows.append(
            (
                method.name,
                f"{100 * shared(config, dataset):.0f} %",
                *(f"{value:.2f}" for name in ("alone", "together") for value in found[name]),
                *(f"{ratio:.1f}" for ratio in ratios),
            )
        )
    ways = ("alone", "together", "gain")
    header = ("method", "shared", *(f"{way}, {of}" for way in ways for of in ("wall", "processor")))
    return markdown_table(header, rows)


def made_up(chosen: Together) -> Dataset:
    """Features that have no meaning, and labels of ten classes; a test split of a tenth."""
    rng = np.random.default_rng(0)

    def split(size: int) -> dict[str, np.ndarray]:
        inputs = rng.standard_normal((size, chosen.features, 1, 1), np.float32)
        return {"inputs": inputs, "labels": rng.integers(0, 10, size, np.int32)}

    return Dataset("made up", split(chosen.examples), split(chosen.examples // 10), 10)


def measure(
    config: TrainConfig, dataset: Dataset, rates: list[float], rounds: int
) -> dict[str, tuple[float, float]]:
    """Wall and processor seconds of a run, by whether it is trained alone or together."""
    plan = make_plan(config, dataset.train_size)
    fields = {name: value for name, value in vars(config).items() if name != "learning_rate"}
    configs = [TrainConfig(**fields, learning_rate=rate) for rate in rates]
    ways: dict[str, Callable[[], Iterable[Any]]] = {
        "alone": lambda: [train(config, dataset, plan) for config in configs],
        "together": lambda: list(train_together(configs, dataset, plan)),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            begun = time.perf_counter(), time.process_time()
            way()
            spent = time.perf_counter() - begun[0], time.process_time() - begun[1]
            if turn:  # the first one compiles
                times[name].append((spent[0] / len(rates), spent[1] / len(rates)))
    return {
        name: (statistics.median(w for w, _ in each), statistics.median(p for _, p in each))
        for name, each in times.items()
    }
