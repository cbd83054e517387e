"""Writes the tables and the figure on the released code."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from dpoptax.training.run.figures import COLORS, label
from dpoptax.training.run.files import markdown_table
from experiments.released.decomposition import Record, comparisons
from experiments.released.noise import Setting, measure
from experiments.released.problems import PROBLEMS
from experiments.spreads import mean_and_deviation, mean_and_interval, paired_difference

Rows = Iterable[Sequence[str]]
EPSILONS = (1.0, 3.0, 8.0)
PARTS = {
    "DP-PMLF": (
        ("step length", "DP-SGD, rate × 2", "DP-SGD"),
        ("past point and filter", "released, right noise", "DP-SGD, rate × 2"),
        ("missing noise", "released", "released, right noise"),
        ("all", "released", "DP-SGD"),
        ("the paper's algorithm", "paper", "DP-SGD"),
    ),
    "DiSK": (
        ("normalization", "DP-SGD, normalized", "DP-SGD"),
        ("averaging", "average, normalized", "DP-SGD, normalized"),
        ("second point", "released, right noise", "average, normalized"),
        ("missing noise", "released", "released, right noise"),
        ("all", "released", "DP-SGD"),
        ("the paper's algorithm", "paper", "DP-SGD"),
        ("the same, normalized", "paper, normalized", "DP-SGD, normalized"),
    ),
}
"""For each comparison, parts of the difference from DP-SGD: name, with and without the part."""
_MARKERS = {
    "step length": ("o", COLORS[0]),
    "normalization": ("o", COLORS[0]),
    "averaging": ("s", COLORS[2]),
    "past point and filter": ("s", COLORS[2]),
    "second point": ("v", COLORS[5]),
    "missing noise": ("^", COLORS[1]),
    "all": ("D", "black"),
    "the paper's algorithm": ("x", "gray"),
}
"""Marker and color of each part in the figure."""


def price_row(setting: Setting) -> tuple[str, ...]:
    """Returns name, noise, sensitivity, multiplier, σ and the true ε of a setting."""
    measured = measure(setting.rule)
    prices = [setting.prices(epsilon, measured) for epsilon in EPSILONS]
    return (
        setting.name,
        f"{measured.noise:.3f}",
        f"{np.fmax(measured.same, measured.opposite):.3f}",
        f"{measured.multiplier:.3f}",
        " / ".join(f"{sigma:.2f}" for sigma, _ in prices),
        *(f"{true:.3g}" if true < 1000 else f"{true:.0f}" for _, true in prices),
    )


PRICE_HEADER = (
    "code and run",
    "noise / σC",
    "sensitivity / C",
    "multiplier / σ",
    "σ",
    *(f"ε for a stated {epsilon:g}" for epsilon in EPSILONS),
)


class Column(NamedTuple):
    """A column of a table: the runs on one problem at one ε.

    Attributes:
        problem: Name of the problem.
        epsilon: The stated ε.
        records: The runs on the problem.
    """

    problem: str
    epsilon: float
    records: Sequence[Record]

    @property
    def title(self) -> str:
        """Its header."""
        return f"{PROBLEMS[self.problem].title}, ε = {self.epsilon:g}"

    def accuracies(self, comparison: str, arm: str) -> dict[int, float]:
        """Returns the accuracies of an arm by seed, in percent."""
        where = comparison, arm, self.epsilon
        return {
            record.seed: 100 * record.accuracy
            for record in self.records
            if (record.comparison, record.arm, record.stated_epsilon) == where
        }

    def difference(self, comparison: str, arm: str, other: str) -> tuple[float, float]:
        """Returns the mean difference of two arms, paired by seed, and half its 95 % interval."""
        ours, theirs = (self.accuracies(comparison, name) for name in (arm, other))
        return paired_difference(ours, theirs)


def columns(runs: Mapping[str, Sequence[Record]]) -> list[Column]:
    """Returns a column for each problem and ε."""
    return [
        Column(name, epsilon, records)
        for name, records in runs.items()
        for epsilon in PROBLEMS[name].epsilons
    ]


def shown_in_figure(runs: Mapping[str, Sequence[Record]]) -> list[Column]:
    """Returns the columns of MNIST, and those of ε = 1 of other problems."""
    return [c for c in columns(runs) if c.problem == "linear-mnist" or c.epsilon == 1.0]


def accuracy_table(comparison: str, shown: Sequence[Column]) -> str:
    """Returns mean accuracies ± standard deviations over seeds, in percent."""
    arms = comparisons(PROBLEMS[shown[0].problem])[comparison].arms
    rows = [
        (
            *(arm.name, f"{arm.rate:g}", "yes" if arm.private else "no"),
            *(mean_and_deviation(c.accuracies(comparison, arm.name).values()) for c in shown),
        )
        for arm in arms
    ]
    header = "update", "rate", "ε holds", *(f"ε = {column.epsilon:g}" for column in shown)
    return markdown_table(header, rows)


def parts_table(comparison: str, shown: Sequence[Column]) -> str:
    """Returns differences in points with 95 % intervals, paired by seed."""
    known = {arm.name for arm in comparisons(PROBLEMS[shown[0].problem])[comparison].arms}
    rows = [
        (
            *(name, f"{with_part} − {without}"),
            *(mean_and_interval(*c.difference(comparison, with_part, without)) for c in shown),
        )
        for name, with_part, without in PARTS[comparison]
        if {with_part, without} <= known
    ]
    header = "part", "difference of", *(f"ε = {column.epsilon:g}" for column in shown)
    return markdown_table(header, rows)


def draw(shown: Sequence[Column], path: Path) -> None:
    """Draws the parts of each method's difference from DP-SGD, a group for each column."""
    figure = Figure(figsize=(10.0, 2.0 + 0.75 * len(shown)), layout="constrained")
    axes_of = figure.subplots(1, 2, sharey=True)
    for axes, (comparison, parts) in zip(axes_of, PARTS.items(), strict=True):
        drawn = [part for part in parts if part[0] in _MARKERS]
        places = np.linspace(-0.32, 0.32, len(drawn))
        for place, (name, with_part, without) in zip(places, drawn, strict=True):
            found = [column.difference(comparison, with_part, without) for column in shown]
            means, halves = zip(*found, strict=True)
            marker, color = _MARKERS[name]
            axes.errorbar(
                means,
                place + np.arange(len(shown)),
                xerr=halves,
                fmt=marker,
                color=color,
                label=name,
                markersize=5,
                capsize=2,
            )
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(shown)), [column.title for column in shown])
        axes.set_title(comparison, fontsize="medium")
        label(axes, "points of accuracy", "")
        axes.legend(
            frameon=False,
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.14),
            ncol=3,
            columnspacing=1,
        )
    axes_of[0].invert_yaxis()
    figure.savefig(path, dpi=150)


def page(runs: Mapping[str, Sequence[Record]], prices: Rows, geodp: Rows) -> str:
    """Returns the record of all measurements in Markdown.

    Args:
        runs: The runs by the name of their problem.
        prices: Rows of the table of prices.
        geodp: Rows of the table on GeoDP.
    """
    parts = [
        "# Measurements of the papers' released code",
        "`python -m experiments released-code --data-dir DIR` writes this page. "
        "`docs/results/released-code.md` explains it, and "
        "[settings.md](released-code/settings.md) has the settings.",
        "## Noise and sensitivity",
        "δ = N^−1.1. The true ε holds for adding or removing an example under Poisson sampling.",
        markdown_table(PRICE_HEADER, prices),
    ]
    for name in runs:
        shown = [column for column in columns(runs) if column.problem == name]
        seeds = len({record.seed for record in shown[0].records})
        for comparison in PARTS:
            parts += [
                f"## {comparison}: a linear model on {PROBLEMS[name].title}",
                f"Test accuracy in percent over {seeds} seeds, ± standard deviation.",
                accuracy_table(comparison, shown),
                "Differences in points, paired by seed, with 95 % intervals.",
                parts_table(comparison, shown),
            ]
    header = (
        *("σ", "B", "β", "DP as released", "GeoDP as released"),
        *("DP, not clipped", "GeoDP, clipped"),
    )
    parts += [
        "## GeoDP: logistic regression on the digits 0 and 1",
        "Training loss after 50 and 350 steps, one seed. No ε is stated.",
        markdown_table(header, geodp),
    ]
    return "\n\n".join(parts) + "\n"
