"""Defines the results of comparisons and sweeps, for results.json and sweep.json."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

from dpoptax.training.evaluation import Score
from dpoptax.training.search.price import Price

Record = dict[str, Any]
"""Record of a run: its summary and its `history`."""


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """A tried learning rate.

    Attributes:
        learning_rate: The rate.
        validation_scores: Scores on the held-out fifth, one per seed. Empty if there was
            only one rate.
    """

    learning_rate: float
    validation_scores: list[float]


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """Result of one config.

    Attributes:
        name: Name of the method, with the name of the config if several share the method.
        config: Name of the config.
        private: Whether an ε is stated.
        unproven: Reason why no ε is stated in spite of noise, or None.
        epsilon: ε of one run.
        learning_rate: The selected learning rate.
        test_score_mean: Mean test score over seeds, by default of the accuracy.
        test_score_std: Standard deviation over seeds, or None for one seed.
        seconds_per_run: Mean training time.
        grid: The learning rates tried.
        runs: The runs at the selected rate, one per seed.
        scores: Their test scores.
    """

    name: str
    config: str
    private: bool
    unproven: str | None
    epsilon: float | None
    learning_rate: float
    test_score_mean: float
    test_score_std: float | None
    seconds_per_run: float
    grid: list[GridPoint]
    runs: list[Record]
    scores: list[float]


def method_result(
    name: str,
    config: str,
    grid: Sequence[GridPoint],
    learning_rate: float,
    runs: list[Record],
    score: Score,
) -> MethodResult:
    """Returns the result of a config from its runs at the selected rate."""
    scores = [score.of(run) for run in runs]
    finite = all(map(math.isfinite, scores))
    return MethodResult(
        name=name,
        config=config,
        private=runs[0]["private"],
        unproven=runs[0]["unproven"],
        epsilon=runs[0]["epsilon"],
        learning_rate=learning_rate,
        test_score_mean=statistics.fmean(scores),
        test_score_std=statistics.stdev(scores) if len(runs) > 1 and finite else None,
        seconds_per_run=statistics.fmean(run["train_seconds"] for run in runs),
        grid=list(grid),
        runs=runs,
        scores=scores,
    )


@dataclasses.dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison.

    Attributes:
        dataset: Name of the data set.
        epsilon: ε of every private config, or None without private configs.
        delta: δ of every private config, or None.
        seeds: Seeds of the runs.
        notes: Notes below the table.
        methods: Results in the order of the configs.
        versions: Versions of the packages.
        code: SHA-256 of the package's source files.
        score: The metric by which the methods are compared.
    """

    dataset: str
    epsilon: float | None
    delta: float | None
    seeds: list[int]
    notes: list[str]
    methods: list[MethodResult]
    versions: dict[str, str]
    code: str
    score: Score = Score()


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep.

    Attributes:
        settings: Name of the config and changed fields, by column of a table.
        score: Held-out score with noise.
        record: Name of the file of its record.
    """

    settings: dict[str, Any]
    score: float
    record: str


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
        price: Privacy cost of publishing the result.
        notes: Statements on its privacy.
        trials: Trials in the order of their draws.
        best: Index of the trial with the highest score, or None without trials.
        result: Content of best/summary.json, or None without trials.
        versions: Versions of the packages.
    """

    price: Price
    notes: list[str]
    trials: list[TrialResult]
    best: int | None
    result: dict[str, Any] | None
    versions: dict[str, str]
