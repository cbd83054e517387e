"""Writes the tables and the figure on the released code."""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from dpoptax.training.run.figures import COLOURS, label, signed
from dpoptax.training.run.records import markdown_table
from experiments.released.decomposition import EPSILONS, Record, comparisons
from experiments.released.noise import Setting, measure

Rows = Iterable[Sequence[str]]
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


def accuracy_table(records: Sequence[Record], comparison: str) -> str:
    """Returns mean accuracies ± standard deviations over seeds, in percent."""
    rows = []
    for arm in comparisons()[comparison].arms:
        cells = []
        for epsilon in EPSILONS:
            values = list(_accuracies(records, comparison, arm.name, epsilon).values())
            cells.append(f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}")
        rows.append((arm.name, f"{arm.rate:g}", "yes" if arm.private else "no", *cells))
    header = "update", "rate", "ε holds", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)
    return markdown_table(header, rows)


def parts_table(records: Sequence[Record], comparison: str) -> str:
    """Returns differences in points with 95 % intervals, paired by seed."""
    rows = []
    for name, with_part, without in PARTS[comparison]:
        cells = []
        for epsilon in EPSILONS:
            mean, half = difference(records, comparison, with_part, without, epsilon)
            cells.append(f"{signed(mean, 2)} ± {half:.2f}")
        rows.append((name, f"{with_part} − {without}", *cells))
    header = "part", "difference of", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)
    return markdown_table(header, rows)


def difference(
    records: Sequence[Record], comparison: str, arm: str, other: str, epsilon: float
) -> tuple[float, float]:
    """Returns the mean difference, paired by seed, and half its 95 % interval."""
    ours, theirs = (_accuracies(records, comparison, name, epsilon) for name in (arm, other))
    values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    quantile = float(stats.t.ppf(0.975, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def _accuracies(
    records: Sequence[Record], comparison: str, arm: str, epsilon: float
) -> dict[int, float]:
    where = comparison, arm, epsilon
    return {
        record.seed: 100 * record.accuracy
        for record in records
        if (record.comparison, record.arm, record.stated_epsilon) == where
    }


def draw(records: Sequence[Record], path: Path) -> None:
    """Draws the parts of each method's difference from DP-SGD, at each stated ε."""
    figure = Figure(figsize=(10.0, 3.4), layout="constrained")
    for axes, (comparison, parts) in zip(figure.subplots(1, 2), PARTS.items(), strict=True):
        shown = parts[: [name for name, _, _ in parts].index("all")]
        for row, epsilon in enumerate(EPSILONS):
            left = 0.0
            for i, (name, with_part, without) in enumerate(shown):
                mean, half = difference(records, comparison, with_part, without, epsilon)
                once = name if row == 0 else None
                colour = COLOURS[1] if name == "missing noise" else COLOURS[(0, 2, 5)[i]]
                axes.barh(
                    row, mean, left=left, xerr=half, color=colour, label=once, capsize=2, height=0.6
                )
                left += mean
            mean, half = difference(records, comparison, "paper", "DP-SGD", epsilon)
            once = "the paper's algorithm" if row == 0 else None
            axes.errorbar(
                mean, row, xerr=half, fmt="D", color="black", markersize=5, label=once, zorder=4
            )
        axes.set_yticks(range(len(EPSILONS)), [f"stated ε = {e:g}" for e in EPSILONS])
        axes.invert_yaxis()
        axes.set_title(comparison, fontsize="medium")
        label(axes, "points of accuracy above DP-SGD", "")
        axes.legend(
            frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncol=3
        )
    figure.savefig(path, dpi=150)


def page(records: Sequence[Record], prices: Rows, geodp: Rows) -> str:
    """Returns the record of all measurements in Markdown."""
    parts = [
        "# Measurements of the papers' released code",
        "`python -m experiments released-code --data-dir DIR` writes this page. "
        "`docs/results/released-code.md` explains it.",
        "## Noise and sensitivity",
        "δ = N^−1.1. The true ε holds for adding or removing an example under Poisson sampling.",
        markdown_table(PRICE_HEADER, prices),
    ]
    for comparison in comparisons():
        seeds = len({record.seed for record in records if record.comparison == comparison})
        parts += [
            f"## {comparison}: a linear model on MNIST",
            f"Test accuracy in percent over {seeds} seeds, ± standard deviation.",
            accuracy_table(records, comparison),
            "Differences in points, paired by seed, with 95 % intervals.",
            parts_table(records, comparison),
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
