"""Results of comparisons and sweeps, as results.json and sweep.json hold them."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from dpoptax.training.search.price import Price

Record = dict[str, Any]
"""A run: its summary with its `history`, as its file holds it."""


@dataclasses.dataclass(frozen=True)
class GridPoint:
    """A tried learning rate.

    Attributes:
        learning_rate: The rate.
        validation_accuracies: Accuracies on the held-out fifth, one for each seed. Empty if there
            was nothing to select.
    """

    learning_rate: float
    validation_accuracies: list[float]


@dataclasses.dataclass(frozen=True)
class MethodResult:
    """Result of one config.

    Attributes:
        name: Of the method, with that of the config where two have one method.
        config: Name of the config.
        private: Whether an ε is stated.
        unproven: Reason why no ε is stated in spite of noise.
        epsilon: Of one run.
        learning_rate: The one that was selected.
        test_accuracy_mean: Over the seeds.
        test_accuracy_std: Over the seeds; None for one.
        seconds_per_run: Mean time of training.
        grid: The rates that were tried.
        runs: Those at the selected rate, one a seed.
    """

    name: str
    config: str
    private: bool
    unproven: str | None
    epsilon: float | None
    learning_rate: float
    test_accuracy_mean: float
    test_accuracy_std: float | None
    seconds_per_run: float
    grid: list[GridPoint]
    runs: list[Record]

    @property
    def accuracies(self) -> list[float]:
        """Test accuracies at the selected rate, one a seed."""
        return [run["test_accuracy"] for run in self.runs]


def method_result(
    name: str, config: str, learning_rate: float, grid: Sequence[GridPoint], runs: list[Record]
) -> MethodResult:
    """The result of a config whose runs at the selected rate are `runs`."""
    accuracies = [run["test_accuracy"] for run in runs]
    return MethodResult(
        name=name,
        config=config,
        private=runs[0]["private"],
        unproven=runs[0]["unproven"],
        epsilon=runs[0]["epsilon"],
        learning_rate=learning_rate,
        test_accuracy_mean=statistics.fmean(accuracies),
        test_accuracy_std=statistics.stdev(accuracies) if len(runs) > 1 else None,
        seconds_per_run=statistics.fmean(run["train_seconds"] for run in runs),
        grid=list(grid),
        runs=runs,
    )


@dataclasses.dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison.

    Attributes:
        dataset: The data set's name.
        epsilon: ε of every private config. None without private configs.
        delta: The same.
        seeds: Of the runs.
        notes: Notes below the table.
        methods: In the order of the configs.
        versions: Versions of the packages.
        code: SHA-256 of the package's source files.
    """

    dataset: str
    epsilon: float | None
    delta: float | None
    seeds: list[int]
    notes: list[str]
    methods: list[MethodResult]
    versions: dict[str, str]
    code: str


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """A trial of a sweep.

    Attributes:
        config: The name of its config.
        changes: Changed fields and their values.
        score: Held-out accuracy, with noise where that is asked for.
        record: The name of its file.
    """

    config: str
    changes: dict[str, Any]
    score: float
    record: str

    @property
    def settings(self) -> dict[str, Any]:
        """The config and the changed fields, by the names of a table's columns."""
        return {"config": self.config, **self.changes}


@dataclasses.dataclass(frozen=True)
class SweepResult:
    """Result of a sweep.

    Attributes:
        begun: Its options and its seed, by which a second start recognizes it.
        price: What publishing the result costs.
        notes: Statements on its privacy.
        trials: In the order in which they were drawn.
        versions: Versions of the packages.
        result: What best/summary.json holds; None where no trial was drawn.
    """

    begun: dict[str, Any]
    price: Price
    notes: list[str]
    trials: list[TrialResult]
    versions: dict[str, str]
    result: dict[str, Any] | None

    @property
    def best(self) -> int | None:
        """The index of the trial with the greatest score."""
        return best_of(self.trials)

    def to_dict(self) -> dict[str, Any]:
        """As sweep.json holds it."""
        rows = [
            {**trial.settings, "score": trial.score, "record": trial.record}
            for trial in self.trials
        ]
        found = {} if self.result is None else {"result": self.result}
        return {
            **self.begun,
            "price": dataclasses.asdict(self.price),
            "notes": self.notes,
            "best": self.best,
            "trials": rows,
            "versions": self.versions,
            **found,
        }


def best_of(trials: Sequence[TrialResult]) -> int | None:
    """The index of the trial with the greatest score, the first of those; None of none."""
    return max(range(len(trials)), key=lambda index: trials[index].score, default=None)
