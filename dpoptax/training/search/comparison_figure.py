"""Draws a comparison as a PNG and a PDF file."""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpoptax.training.run.figures import COLORS, label, scientific, signed
from dpoptax.training.search.results import ComparisonResult, MethodResult

_NOT_PRIVATE = "#666666"
_BASELINE = "DP-SGD"


def plot_comparison(results: ComparisonResult, path: Path) -> None:
    """Draws the test scores of each method and its difference from a baseline, as PNG and PDF.

    A row for each method shows every seed, the mean, and the mean paired difference from the
    baseline with its standard error. The baseline is DP-SGD, or else the first method.
    """
    figure = Figure(figsize=(6.5, 1.4 + 0.3 * len(results.methods)), layout="constrained")
    _plot_scores(figure.subplots(), results)
    privacy = "without privacy"
    if results.epsilon is not None and results.delta is not None:
        privacy = f"ε = {results.epsilon:g}, δ = {scientific(results.delta)}"
    seeds = len(results.seeds)
    counted = f"{seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{results.dataset}, {privacy}; {counted}", fontsize="large")
    for suffix in (".png", ".pdf"):
        figure.savefig(path.with_suffix(suffix), dpi=200)


def _plot_scores(axes: Axes, results: ComparisonResult) -> None:
    """Draws a row for each method."""
    methods = results.methods
    score = results.score
    scores = [score.scale * np.array(method.scores) for method in methods]
    names = [method.name for method in methods]
    baseline = names.index(_BASELINE) if _BASELINE in names else 0
    first = scores[baseline]
    axes.axvline(first.mean(), color="#BBBBBB", linewidth=1, zorder=0)
    low, digits = -math.inf, 4
    if score.scale == 100:
        # A method that hardly learns is drawn at the edge, to keep the scale readable.
        low = min(float(np.median([values.mean() for values in scores])) - 15, first.min() - 2)
        low, digits = max(low, min(float(values.min()) for values in scores) - 1), 1
    for row, values in enumerate(scores):
        color = _color(methods, row)
        shown = np.maximum(values, low)
        axes.plot(shown, [row] * len(values), "o", color=color, alpha=0.35, markersize=4)
        axes.plot(max(values.mean(), low), row, marker="|", color=color, markersize=15, mew=2.4)
        text = f"{values.mean():.{digits}f}"
        if row != baseline and len(values) > 1:
            difference = values - first
            error = difference.std(ddof=1) / math.sqrt(len(values))
            text += f"   {signed(difference.mean(), digits)} ± {error:.{digits}f}"
        elif row != baseline:
            text += f"   {signed(values.mean() - first.mean(), digits)}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    if low > -math.inf:  # after the points, because it ends the automatic scale on the right
        axes.set_xlim(left=low - 0.5)
    axes.set_yticks(range(len(names)), [x.replace(" (", "\n(") for x in names], fontsize=9)
    for row, name in enumerate(axes.get_yticklabels()):
        name.set_color(_color(methods, row))
    axes.set_ylim(len(methods) - 0.4, -0.6)
    label(axes, score.label("test"), "")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    title = f"Mean, and difference from {names[baseline]}"
    if len(results.seeds) > 1:
        title += " ± standard error"
    axes.set_title(title, fontsize="medium")


def _color(methods: list[MethodResult], index: int) -> str:
    return COLORS[index % len(COLORS)] if methods[index].private else _NOT_PRIVATE
