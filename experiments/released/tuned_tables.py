"""Writes the table on normalized steps next to tuned optimizers."""

import statistics
from collections.abc import Mapping, Sequence

from dpoptax.training.run.records import markdown_table
from experiments.released.tables import (
    mean_and_deviation,
    mean_and_interval,
    paired_difference,
)
from experiments.released.tuning import METHODS, SCHEDULES, Run, best_rate


def tuned_section(runs: Mapping[str, Sequence[Run]]) -> str:
    """Returns the part of the page on tuned learning rates, for runs by the title of their data."""
    parts = [
        "## Normalized steps against tuned optimizers",
        "Test accuracy in percent over the seeds, ± standard deviation, at the learning rate with "
        "the best held-out accuracy. Differences in points, paired by seed, with 95 % intervals, "
        "are from the runs with the best held-out accuracy: of DP-SGD, and of momentum and Adam.",
    ]
    for title, found in runs.items():
        for epsilon in sorted({run.epsilon for run in found}):
            at_epsilon = [run for run in found if run.epsilon == epsilon]
            parts += [f"### {title}, ε = {epsilon:g}", tuned_table(at_epsilon)]
    return "\n" + "\n\n".join(parts) + "\n"


def tuned_table(runs: Sequence[Run]) -> str:
    """Returns accuracies at tuned rates, and differences from DP-SGD and from momentum or Adam.

    The runs are of one problem at one ε. Each difference is from the run with the best held-out
    accuracy, of DP-SGD with either schedule, and of momentum and Adam with either schedule.
    """
    plain = _best(runs, ["dp_sgd"])
    adaptive = _best(runs, ["momentum", "adam"])
    rows = []
    for method, (title, _, _) in METHODS.items():
        for end in SCHEDULES:
            name = method + end
            rate = best_rate(runs, name)
            tried = [run.learning_rate for run in runs if run.name == name and _is_trial(run)]
            edge = ", edge of the grid" if rate in (min(tried), max(tried)) else ""
            cells = [
                "" if name == other else mean_and_interval(*_difference(runs, name, other))
                for other in (plain, adaptive)
            ]
            shown = f"{title}, cosine" if end else title
            accuracy = mean_and_deviation(_accuracies(runs, name).values())
            rows.append((shown, f"{rate:g}{edge}", accuracy, *cells))
    header = (
        *("run", "rate", "accuracy"),
        *(f"difference from {_title(name)}" for name in (plain, adaptive)),
    )
    return markdown_table(header, rows)


def _title(name: str) -> str:
    method = name.removesuffix("_cosine")
    return METHODS[method][0] + (", cosine" if method != name else "")


def _is_trial(run: Run) -> bool:
    return run.split == "held-out"


def _best(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """Returns the run of these methods with the best mean held-out accuracy."""
    names = [method + end for method in methods for end in SCHEDULES]
    return max(names, key=lambda name: _held_out_accuracy(runs, name))


def _held_out_accuracy(runs: Sequence[Run], name: str) -> float:
    rate = best_rate(runs, name)
    return statistics.fmean(
        run.accuracy
        for run in runs
        if (run.name, run.learning_rate) == (name, rate) and _is_trial(run)
    )


def _accuracies(runs: Sequence[Run], name: str) -> dict[int, float]:
    return {
        run.seed: 100 * run.accuracy for run in runs if run.name == name and run.split == "test"
    }


def _difference(runs: Sequence[Run], name: str, other: str) -> tuple[float, float]:
    return paired_difference(_accuracies(runs, name), _accuracies(runs, other))
