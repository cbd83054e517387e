"""Draws comparisons and sweeps as PNG files."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dpoptax.training.run.plots import COLOURS, label, scientific, signed
from dpoptax.training.run.records import epsilon_text
from dpoptax.training.search.results import ComparisonResult, MethodResult, SweepResult

# Places on the x axis, and an accuracy for each seed and place.
Curves: TypeAlias = Callable[[MethodResult], tuple[list[float], np.ndarray]]

_NOT_PRIVATE = {"color": "#666666", "linestyle": "--"}
_BASELINE = "DP-SGD"


def plot_comparison(results: ComparisonResult, path: Path) -> None:
    """Draws the test accuracy of each method, its difference from a baseline, and its curves.

    On the left a row for each method shows every seed, the mean, and the mean difference from the
    baseline over equal seeds with its standard error. On the right a panel for each method shows
    the accuracy over steps, and over learning rates if several were tried, with the baseline in
    gray behind it. The baseline is DP-SGD, or without it the first method.
    """
    methods = results.methods
    kinds = [_over_steps]
    if any(len(method.grid) > 1 for method in methods):
        kinds.append(_over_rates)
    columns = min(5, len(methods))
    rows = math.ceil(len(methods) / columns)
    height = max(3.4, 0.9 + 1.45 * rows * len(kinds))
    figure = Figure(figsize=(14.5, height), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=[1, 1.9])
    left, right = parts
    _plot_accuracies(left.subplots(), results)
    floor = _floor(methods)
    blocks = np.atleast_1d(right.subfigures(len(kinds), 1))
    for block, curves in zip(blocks, kinds, strict=True):
        _small_multiples(block, results, curves, (rows, columns), floor)
    privacy = "without privacy"
    if results.epsilon is not None and results.delta is not None:
        privacy = f"ε = {results.epsilon:g}, δ = {scientific(results.delta)}"
    seeds = len(results.seeds)
    spread = f"bands: ± a standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{results.dataset}, {privacy}; {spread}", fontsize="large")
    figure.savefig(path, dpi=200)


def _plot_accuracies(axes: Axes, results: ComparisonResult) -> None:
    """A row a method: its seeds, their mean, and the difference from the baseline."""
    methods = results.methods
    accuracies = [100 * np.array(method.accuracies) for method in methods]
    baseline = _baseline(methods)
    first = accuracies[baseline]
    axes.axvline(first.mean(), color="#BBBBBB", linewidth=1, zorder=0)
    # One method that hardly learns would press all others together: it is put at the edge.
    low = min(float(np.median([values.mean() for values in accuracies])) - 15, first.min() - 2)
    low = max(low, min(float(values.min()) for values in accuracies) - 1)
    for row, values in enumerate(accuracies):
        style = _style(methods, row)
        shown = np.maximum(values, low)
        axes.plot(shown, [row] * len(values), "o", color=style["color"], alpha=0.35, markersize=4)
        axes.plot(
            max(values.mean(), low), row, marker="|", color=style["color"], markersize=15, mew=2.4
        )
        text = f"{values.mean():.1f}"
        if row != baseline and len(values) > 1:
            difference = values - first
            error = difference.std(ddof=1) / math.sqrt(len(values))
            text += f"   {signed(difference.mean())} ± {error:.1f}"
        elif row != baseline:
            text += f"   {signed(values.mean() - first.mean())}"
        axes.text(1.02, row, text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks(range(len(methods)), [_short(method) for method in methods], fontsize=9)
    for row, name in enumerate(axes.get_yticklabels()):
        name.set_color(_style(methods, row)["color"])
    axes.set_ylim(len(methods) - 0.4, -0.6)
    axes.set_xlim(left=low - 0.5)
    label(axes, "test accuracy (%)", "")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"Mean, and difference from {methods[baseline].name}", fontsize="medium")


def _small_multiples(
    figure: Any,
    results: ComparisonResult,
    curves: Curves,
    shape: tuple[int, int],
    floor: float,
) -> None:
    """A panel a method, the baseline in grey behind each of the others."""
    methods = results.methods
    baseline = _baseline(methods)
    panels = figure.subplots(*shape, sharex=True, sharey=True, squeeze=False).ravel()
    behind = {"color": "#999999", "linestyle": "-", "linewidth": 1.0}
    for index, axes in enumerate(panels):
        if index >= len(methods):
            axes.set_visible(False)
            continue
        if index != baseline:
            _curve(axes, methods[baseline], behind, curves)
        _curve(axes, methods[index], _style(methods, index), curves)
        axes.set_title(_short(methods[index]), fontsize="x-small", pad=2)
        axes.set_ylim(bottom=floor, top=100)
        label(axes, "", "")
    over_rates = curves is _over_rates
    if over_rates:
        _rate_axis(panels[0], methods)
    figure.supxlabel("learning rate" if over_rates else "step", fontsize="medium")
    figure.supylabel(f"{'validation' if over_rates else 'test'} accuracy (%)", fontsize="medium")


def _over_steps(method: MethodResult) -> tuple[list[float], np.ndarray]:
    steps = [record["step"] for record in method.runs[0]["history"]]
    accuracies = [[record["test_accuracy"] for record in run["history"]] for run in method.runs]
    return steps, np.array(accuracies)


def _over_rates(method: MethodResult) -> tuple[list[float], np.ndarray]:
    points = sorted(method.grid, key=lambda point: point.learning_rate)
    rates = [point.learning_rate for point in points]
    return rates, np.array([point.validation_accuracies for point in points]).T


def _curve(
    axes: Axes,
    method: MethodResult,
    style: dict[str, Any],
    curves: Curves,
) -> None:
    """The mean over seeds, in a band of ± one standard deviation."""
    x, accuracies = curves(method)
    if accuracies.size == 0:  # no grid, so nothing was selected
        return
    mean = 100 * accuracies.mean(axis=0)
    axes.plot(x, mean, **style)
    if len(accuracies) > 1 and "label" in style:
        spread = 100 * accuracies.std(axis=0, ddof=1)
        low, high = mean - spread, mean + spread
        axes.fill_between(x, low, high, color=style["color"], alpha=0.14, linewidth=0)


def _rate_axis(axes: Axes, methods: list[MethodResult]) -> None:
    axes.set_xscale("log")
    rates = [point.learning_rate for method in methods for point in method.grid]
    between = (1.0,) if max(rates) > 100 * min(rates) else (1.0, 2.0, 5.0)
    axes.xaxis.set_major_locator(LogLocator(subs=between))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _style(methods: list[MethodResult], index: int) -> dict[str, Any]:
    method = methods[index]
    style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": "-"}
    if not method.private:
        style = dict(_NOT_PRIVATE)
    return {**style, "linewidth": 1.5, "label": method.name}


def _baseline(methods: list[MethodResult]) -> int:
    names = [method.name for method in methods]
    return names.index(_BASELINE) if _BASELINE in names else 0


def _short(method: MethodResult) -> str:
    """The name, with what is in brackets on a line of its own."""
    return str(method.name).replace(" (", "\n(")


def plot_sweep(results: SweepResult, path: Path) -> None:
    """Held-out accuracy over each field that was tried, a point a trial, the best one marked."""
    rows, best = [trial.settings for trial in results.trials], results.best
    assert best is not None
    fields = [name for name in rows[0] if len({str(row[name]) for row in rows}) > 1] or ["config"]
    columns = min(4, len(fields))
    lines = math.ceil(len(fields) / columns)
    figure = Figure(figsize=(3.2 * columns + 0.8, 3.0 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    scores = [100 * trial.score for trial in results.trials]
    for index, (axes, name) in enumerate(zip(panels, fields, strict=False)):
        values = [row[name] for row in rows]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        x = values if numbers else [str(value) for value in values]
        axes.plot(x, scores, linestyle="none", marker="o", markersize=4, color=COLOURS[0])
        axes.plot(
            x[best : best + 1],
            scores[best : best + 1],
            linestyle="none",
            marker="o",
            markersize=10,
            markerfacecolor="none",
            color=COLOURS[1],
            label="best",
        )
        if numbers and min(values) > 0 and max(values) > 10 * min(values):
            axes.set_xscale("log")
        axes.margins(x=0.15)
        label(axes, name.replace("_", " "), "" if index % columns else "held-out accuracy (%)")
    for axes in panels[len(fields) :]:
        axes.set_visible(False)
    panels[0].legend(frameon=False)
    epsilon = results.price.epsilon
    privacy = "no ε is stated"
    if epsilon is not None:
        privacy = f"ε = {epsilon_text(epsilon, 2)}, selection included"
    figure.suptitle(f"{len(rows)} trials; {privacy}", fontsize="large")
    figure.savefig(path, dpi=200)


def _floor(methods: list[MethodResult]) -> float:
    """A lower end of the accuracy axis that leaves room to tell the methods apart.

    Those far below the usual one do not count: they leave at the lower edge.
    """
    means = np.array([method.test_accuracy_mean for method in methods])
    worst = means[means >= np.median(means) - 0.15].min()
    return max(0.0, 10 * np.floor(10 * worst - 1.5))
