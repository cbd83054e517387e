"""Writes the tables on normalized steps next to tuned optimizers."""

from collections.abc import Mapping, Sequence

from dpoptax.training.run.files import markdown_table
from experiments.released.tuning import METHODS, SCHEDULES, Run, best_rate
from experiments.spreads import mean_and_deviation, mean_and_interval, paired_difference

REFERENCES = ("dp_sgd", "momentum", "adam")
"""Methods that the others are compared with."""


def tuned_section(runs: Mapping[str, Sequence[Run]]) -> str:
    """Returns the part of the page on tuned learning rates, for runs by the title of their data."""
    settings = {
        f"{title}, ε = {epsilon:g}": [run for run in found if run.epsilon == epsilon]
        for title, found in runs.items()
        for epsilon in sorted({run.epsilon for run in found})
    }
    parts = [
        "## Normalized steps against tuned optimizers",
        "Test accuracy in percent over the seeds, ± standard deviation, at the learning rate with "
        "the best held-out accuracy. Differences in points, paired by seed, with 95 % intervals, "
        "are from runs with the same schedule.",
        _overview(settings),
    ]
    for title, found in settings.items():
        parts += [f"### {title}", tuned_table(found)]
    return "\n" + "\n\n".join(parts) + "\n"


def _overview(settings: Mapping[str, Sequence[Run]]) -> str:
    """Returns a table of all accuracies."""
    rows = [
        (
            _title(method, end),
            *(
                mean_and_deviation(_accuracies(runs, method + end).values())
                for runs in settings.values()
            ),
        )
        for end in SCHEDULES
        for method in METHODS
    ]
    return markdown_table(("run", *settings), rows)


def _title(method: str, end: str) -> str:
    return METHODS[method][0] + (", cosine" if end else "")


def tuned_table(runs: Sequence[Run]) -> str:
    """Returns accuracies at tuned rates, and differences from runs with the same schedule.

    The runs are of one problem at one ε.
    """
    rows = []
    for end in SCHEDULES:
        for method in METHODS:
            name = method + end
            cells = [
                "" if other == method else mean_and_interval(*_difference(runs, name, other + end))
                for other in REFERENCES
            ]
            accuracy = mean_and_deviation(_accuracies(runs, name).values())
            rows.append((_title(method, end), _rate(runs, name), accuracy, *cells))
    references = [f"difference from {METHODS[name][0]}" for name in REFERENCES]
    return markdown_table(("run", "rate", "accuracy", *references), rows)


def _rate(runs: Sequence[Run], name: str) -> str:
    """Returns the selected learning rate, marked if no tried rate is smaller or none is larger."""
    rate = best_rate(runs, name)
    tried = [run.learning_rate for run in runs if run.name == name and run.split == "held-out"]
    return f"{rate:g}" + (", edge of the grid" if rate in (min(tried), max(tried)) else "")


def _accuracies(runs: Sequence[Run], name: str) -> dict[int, float]:
    return {
        run.seed: 100 * run.accuracy for run in runs if run.name == name and run.split == "test"
    }


def _difference(runs: Sequence[Run], name: str, other: str) -> tuple[float, float]:
    return paired_difference(_accuracies(runs, name), _accuracies(runs, other))
