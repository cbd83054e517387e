"""Tunes normalized steps, DP-SGD, momentum and Adam alike on a linear model, in NumPy."""

import collections
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpoptax.training.bars import Bar
from dpoptax.training.run import files
from experiments.released import rules
from experiments.released.decomposition import calibrate
from experiments.released.linear_model import Data, Training, load
from experiments.released.problems import Problem
from experiments.released.rules import Array, LowPass, Rule
from experiments.run_once import append_lines, read_lines

BATCH_SIZE, STEPS, STABILIZER, RATES = 1024, 120, 0.01, 12
HELD_OUT = 0.2


class Adam:
    """Adam's direction m̂_t / (√v̂_t + 10⁻⁸) with decays 0.9 and 0.999."""

    def __init__(self) -> None:
        self._m = LowPass((0.1,), (-0.9,))
        self._v = LowPass((0.001,), (-0.999,))

    def __call__(self, g: Array) -> Array:
        """Returns the direction for the input g_t."""
        found: Array = self._m(g) / (np.sqrt(self._v(g * g)) + 1e-8)
        return found


def cosine(t: int, steps: int) -> float:
    """Returns half a cosine, from 1 to 0."""
    return (1 + math.cos(math.pi * t / steps)) / 2


MEAN = functools.partial(LowPass, (0.1,), (-0.9,))
MOMENTUM = functools.partial(LowPass, (1.0,), (-0.9,), exact=False)
METHODS: Mapping[str, tuple[str, Rule, float]] = {
    "dp_sgd": ("DP-SGD", rules.dp_sgd(), 0.125),
    "momentum": ("momentum", rules.dp_sgd(new_filter=MOMENTUM), 0.0125),
    "adam": ("Adam", rules.dp_sgd(new_filter=Adam), 0.0005),
    "normalized": ("normalized steps", rules.dp_sgd(normalize=True), 0.0125),
    "normalized_mean": (
        "normalized running mean",
        rules.dp_sgd(new_filter=MEAN, normalize=True),
        0.0125,
    ),
}
"""Title, update rule and smallest learning rate by name. Each rate is twice the last."""
SCHEDULES: Mapping[str, Callable[[int], float]] = {
    "": lambda t: 1.0,
    "_cosine": functools.partial(cosine, steps=STEPS),
}
"""Factors of the learning rate by the end of a run's name."""


class Run(NamedTuple):
    """One run.

    Attributes:
        name: Name of the method and end of the schedule.
        epsilon: ε.
        learning_rate: The learning rate.
        seed: The seed.
        split: "held-out" if the run is a trial of a learning rate, else "test".
        accuracy: Accuracy on that split, in [0, 1].
    """

    name: str
    epsilon: float
    learning_rate: float
    seed: int
    split: str
    accuracy: float


def read(path: Path) -> list[Run]:
    """Returns the runs of a file, also of one that `record` wrote; none if it does not exist."""
    return [Run(**{name: line[name] for name in Run._fields}) for line in read_lines(path)]


def tune(problem: Problem, data_dir: Path, output: Path, *, seeds: int = 5) -> list[Run]:
    """Tunes and repeats all methods at each ε that the file of runs does not have yet.

    One trial on held-out training data selects each learning rate. All methods have as many.
    """
    found = read(output)
    planned = [e for e in problem.epsilons if e not in {run.epsilon for run in found}]
    data = load(problem.data(data_dir)) if planned else None
    for epsilon in Bar(planned, unit="ε", disable=not planned):
        assert data is not None
        new = _tune(problem, data, epsilon, seeds)
        versions = files.versions()
        append_lines(output, ({**run._asdict(), "versions": versions} for run in new))
        found += new
    return found


def _tune(problem: Problem, data: Data, epsilon: float, seeds: int) -> list[Run]:
    sigma = calibrate("pld", problem.examples, BATCH_SIZE, STEPS, epsilon)
    train = functools.partial(_train, epsilon=epsilon, sigma=sigma)
    grids = {
        name + end: [least * 2.0**i for i in range(RATES)]
        for name, (_, _, least) in METHODS.items()
        for end in SCHEDULES
    }
    trials = train(_held_out(data), grids, seed=0, split="held-out")
    selected = {name: [best_rate(trials, name)] for name in grids}
    finals = [train(data, selected, seed=seed, split="test") for seed in range(seeds)]
    return trials + [run for final in finals for run in final]


def best_rate(runs: Sequence[Run], name: str) -> float:
    """Returns the learning rate with the best mean held-out accuracy, the smallest of several."""
    trials = collections.defaultdict(list)
    for run in runs:
        if run.name == name and run.split == "held-out":
            trials[run.learning_rate].append(run.accuracy)
    return max(trials, key=lambda rate: (statistics.fmean(trials[rate]), -rate))


def _held_out(data: Data) -> Data:
    """Returns the training data in two parts, the second for selection."""
    order = np.random.default_rng(0).permutation(len(data.labels))
    held, kept = np.split(order, [round(HELD_OUT * len(order))])
    return Data(data.inputs[kept], data.labels[kept], data.inputs[held], data.labels[held])


def _train(
    data: Data,
    grids: Mapping[str, Sequence[float]],
    *,
    epsilon: float,
    sigma: float,
    seed: int,
    split: str,
) -> list[Run]:
    found = []
    for end, schedule in SCHEDULES.items():
        runs = [
            (name + end, rule, rate)
            for name, (_, rule, _) in METHODS.items()
            for rate in grids[name + end]
        ]
        training = Training(BATCH_SIZE, STEPS, STABILIZER, schedule)
        rules_and_rates = [(rule, rate) for _, rule, rate in runs]
        accuracies = training.accuracies(data, rules_and_rates, [sigma], seed=seed)
        found += [
            Run(name, epsilon, rate, seed, split, float(accuracy))
            for (name, _, rate), (accuracy,) in zip(runs, accuracies, strict=True)
        ]
    return found
