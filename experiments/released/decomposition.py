"""Trains released and printed update rules, and DP-SGD of equal step length."""

import functools
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dpoptax import accounting
from dpoptax.accounting import Accountant
from dpoptax.training.bars import Bar
from dpoptax.training.run import files
from experiments.released import rules
from experiments.released.linear_model import Data, Training, load
from experiments.released.problems import Problem
from experiments.released.rules import Average, LowPass, Rule
from experiments.run_once import append_lines, read_lines

FILTER = functools.partial(LowPass, (0.1,), (-0.9,))
GAIN = functools.partial(LowPass, (0.1,), (-0.9,), exact=False)
KAPPA, GAMMA = 0.7, 0.5


class Arm(NamedTuple):
    """An update rule at a learning rate.

    Attributes:
        name: Its name in the records.
        rule: The update rule.
        rate: The learning rate.
        private: Whether the stated ε holds.
    """

    name: str
    rule: Rule
    rate: float
    private: bool = True


class Comparison(NamedTuple):
    """Runs that differ in their update rules and learning rates.

    Attributes:
        training: The settings that the runs share.
        accountant: The accountant that calibrates σ.
        arms: The runs.
    """

    training: Training
    accountant: Accountant
    arms: tuple[Arm, ...]


def warmup_cosine(t: int, steps: int) -> float:
    """Returns a linear warm-up over a twentieth of the steps, then half a cosine."""
    warmup = steps // 20
    if t < warmup:
        return (t + 1) / warmup
    return (1 + math.cos(math.pi * (t - warmup) / (steps - warmup))) / 2


def comparisons(problem: Problem) -> Mapping[str, Comparison]:
    """Returns the comparisons of DP-PMLF and of DiSK."""
    examples = problem.examples
    pmlf, pmlf_gain = rules.released_pmlf(2, FILTER), rules.released_pmlf(2, GAIN)
    disk, missing = rules.released_disk(KAPPA, GAMMA), _noise_share(KAPPA, GAMMA)
    average = functools.partial(Average, KAPPA)
    steps = problem.disk_epochs * examples // 5000
    found = {
        "DP-PMLF": Comparison(
            Training(1000, problem.pmlf_epochs * examples // 1000, 0.01),
            "rdp",
            (
                Arm("DP-SGD", rules.dp_sgd(), 0.5),
                Arm("DP-SGD, filter", rules.dp_sgd(new_filter=FILTER), 0.5),
                Arm("paper", rules.paper_pmlf(2, 0.1, FILTER), 0.5),
                Arm("DP-SGD, rate × 2", rules.dp_sgd(), 1.0),
                Arm("released, right noise", pmlf.scaled_noise(2.0), 0.5),
                Arm("released", pmlf, 0.5, private=False),
                Arm("DP-SGD, rate × 20", rules.dp_sgd(), 10.0),
                Arm("released, filter gain 10", pmlf_gain, 0.5, private=False),
            ),
        ),
        "DiSK": Comparison(
            Training(5000, steps, 0.001, functools.partial(warmup_cosine, steps=steps)),
            "pld",
            (
                Arm("DP-SGD", rules.dp_sgd(), 0.25),
                Arm("paper", rules.paper_disk(KAPPA, GAMMA), 0.25),
                Arm("DP-SGD, normalized", rules.dp_sgd(normalize=True), 0.25),
                Arm("average, normalized", rules.dp_sgd(new_filter=average, normalize=True), 0.25),
                Arm("paper, normalized", rules.paper_disk(KAPPA, GAMMA, normalize=True), 0.25),
                Arm("released, right noise", disk.scaled_noise(1 / missing), 0.25),
                Arm("released", disk, 0.25, private=False),
                Arm("DP-SGD, rate × 20", rules.dp_sgd(), 5.0),
            ),
        ),
    }
    return {
        name: comparison._replace(
            arms=tuple(arm for arm in comparison.arms if arm.name not in problem.left_out)
        )
        for name, comparison in found.items()
    }


def _noise_share(kappa: float, gamma: float) -> float:
    """Returns the released noise multiplier of DiSK, relative to the calibrated one."""
    c = rules.disk_weight(kappa, gamma)
    return abs(1 - c) / (math.hypot(c, 1 - c) * (abs(c) + abs(1 - c)))


class Record(NamedTuple):
    """One run.

    Attributes:
        comparison: Name of the comparison.
        arm: Name of the arm.
        stated_epsilon: ε for which σ is calibrated.
        private: Whether that ε holds.
        seed: The seed.
        noise_multiplier: σ.
        learning_rate: The learning rate.
        accuracy: Test accuracy, in [0, 1].
        versions: Versions of the packages.
    """

    comparison: str
    arm: str
    stated_epsilon: float
    private: bool
    seed: int
    noise_multiplier: float
    learning_rate: float
    accuracy: float
    versions: dict[str, str]


def read(path: Path) -> list[Record]:
    """Returns the records of a file, none if it does not exist."""
    return [Record(**line) for line in read_lines(path)]


def compare(problem: Problem, data_dir: Path, output: Path, *, seeds: int = 5) -> list[Record]:
    """Trains all runs that the file of records does not have yet, and adds them to it.

    The runs of one seed of a comparison at one ε are trained together and written together.
    """
    found = read(output)
    done = {(record.comparison, record.stated_epsilon, record.seed) for record in found}
    every = itertools.product(comparisons(problem), problem.epsilons, range(seeds))
    planned = [run for run in every if run not in done]
    data = load(problem.data(data_dir)) if planned else None
    for name, epsilon, seed in Bar(planned, unit="seed", disable=not planned):
        assert data is not None
        new = _train(problem, name, epsilon, data, seed)
        append_lines(output, (record._asdict() for record in new))
        found += new
    return found


def _train(problem: Problem, name: str, epsilon: float, data: Data, seed: int) -> list[Record]:
    comparison = comparisons(problem)[name]
    training, arms = comparison.training, comparison.arms
    examples, accountant = problem.examples, comparison.accountant
    sigma = calibrate(accountant, examples, training.batch_size, training.steps, epsilon)
    rules_and_rates = [(arm.rule, arm.rate) for arm in arms]
    accuracies = training.accuracies(data, rules_and_rates, [sigma], seed=seed)
    return [
        Record(
            comparison=name,
            arm=arm.name,
            stated_epsilon=epsilon,
            private=arm.private,
            seed=seed,
            noise_multiplier=sigma,
            learning_rate=arm.rate,
            accuracy=float(accuracy),
            versions=files.versions(),
        )
        for arm, (accuracy,) in zip(arms, accuracies, strict=True)
    ]


@functools.cache
def calibrate(
    accountant: Accountant, examples: int, batch_size: int, steps: int, epsilon: float
) -> float:
    """Returns the calibrated noise multiplier at δ = N^−1.1."""
    return accounting.calibrate(
        epsilon=epsilon,
        delta=examples**-1.1,
        steps=steps,
        sampling_probability=batch_size / examples,
        accountant=accountant,
    )
