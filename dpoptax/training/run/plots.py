"""Figures of one run and of a comparison, as PNG files."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

# Okabe and Ito's colours: told apart with every kind of colour vision, and in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X", "<", ">", "h")
_NOT_PRIVATE = {"color": "#666666", "linestyle": "--", "marker": "x"}


def plot_run(summary: dict[str, Any], history: list[dict[str, Any]], path: Path) -> None:
    """Test accuracy, test loss and, for a private run, the ε spent over its steps."""
    steps = [record["step"] for record in history]
    private = summary["private"]
    figure = Figure(figsize=(10.5 if private else 7.0, 3.2), layout="constrained")
    accuracy, loss, *rest = figure.subplots(1, 3 if private else 2)
    accuracy.plot(steps, [100 * record["test_accuracy"] for record in history], color=COLOURS[0])
    accuracy.set_ylim(top=100)
    label(accuracy, "step", "test accuracy (%)")
    loss.plot(steps, [record["test_loss"] for record in history], color=COLOURS[1])
    loss.set_ylim(bottom=0)
    label(loss, "step", "test cross-entropy (nats)")
    guarantee = "no guarantee"
    if private:
        delta = scientific(summary["delta"])
        guarantee = f"ε = {summary['epsilon']:.2f} at δ = {delta}"
        spent = rest[0]
        spent.plot(
            steps, [record["epsilon"] for record in history], color=COLOURS[2], label="spent"
        )
        budget = summary["config"]["epsilon"]
        if budget is not None:
            spent.axhline(budget, color="#666666", linestyle="--", label="budget")
        spent.set_ylim(bottom=0)
        spent.legend(frameon=False, loc="lower right")
        label(spent, "step", f"ε at δ = {delta}")
    figure.suptitle(f"{summary['method']} on {summary['dataset']}, {guarantee}", fontsize="large")
    figure.savefig(path, dpi=200)


def plot_comparison(results: dict[str, Any], path: Path) -> None:
    """Accuracy over steps and over learning rates, each mean in a band of ± one deviation."""
    methods = results["methods"]
    has_grid = any(len(method["grid"]) > 1 for method in methods)
    figure = Figure(figsize=(9.5 if has_grid else 5.5, 4.4), layout="constrained")
    axes = figure.subplots(1, 2 if has_grid else 1, squeeze=False)[0]
    for index, method in enumerate(methods):
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": ("-", ":")[index // len(COLOURS) % 2],
        }
        if not method["private"]:
            style = dict(_NOT_PRIVATE)
        style |= {"markersize": 4.5, "linewidth": 1.4, "label": method["name"]}
        curves = [[record["test_accuracy"] for record in run["history"]] for run in method["runs"]]
        steps = [record["step"] for record in method["runs"][0]["history"]]
        _band(axes[0], steps, np.array(curves), {**style, "markevery": max(1, len(steps) // 6)})
        if has_grid:
            points = sorted(method["grid"], key=lambda point: point["learning_rate"])
            _band(
                axes[1],
                [point["learning_rate"] for point in points],
                np.array([point["validation_accuracies"] for point in points]).T,
                style,
            )
    for panel in axes:  # what has not learnt, or has diverged, leaves the panel at its lower edge
        panel.set_ylim(bottom=_floor(methods), top=100)
    seeds = len(results["seeds"])
    label(axes[0], "step", "test accuracy (%)")
    axes[0].set_title("At the selected learning rate", fontsize="medium")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    if has_grid:
        axes[1].set_xscale("log")
        rates = [point["learning_rate"] for method in methods for point in method["grid"]]
        between = (1.0,) if max(rates) > 100 * min(rates) else (1.0, 2.0, 5.0)
        axes[1].xaxis.set_major_locator(LogLocator(subs=between))
        axes[1].xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        axes[1].xaxis.set_minor_locator(NullLocator())
        label(axes[1], "learning rate", "validation accuracy (%)")
        axes[1].set_title("Selection of the learning rate", fontsize="medium")
    privacy = "without privacy"
    if results["epsilon"] is not None:
        privacy = f"ε = {results['epsilon']:g}, δ = {scientific(results['delta'])}"
    spread = f"mean ± standard deviation of {seeds} seeds" if seeds > 1 else "one seed"
    figure.suptitle(f"{results['dataset']}, {privacy}; {spread}", fontsize="large")
    figure.savefig(path, dpi=200)


def plot_sweep(results: dict[str, Any], path: Path) -> None:
    """Held-out accuracy over each field that was tried, a point a trial, the best one marked."""
    rows, best = results["trials"], results["best"]
    fields = [
        name
        for name in rows[0]
        if name not in ("score", "record") and len({str(row[name]) for row in rows}) > 1
    ] or ["config"]
    columns = min(4, len(fields))
    lines = math.ceil(len(fields) / columns)
    figure = Figure(figsize=(3.2 * columns + 0.8, 3.0 * lines + 0.5), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    scores = [100 * row["score"] for row in rows]
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
    epsilon = results["price"]["epsilon"]
    privacy = "no ε is stated" if epsilon is None else f"ε = {epsilon:.2f}, selection included"
    figure.suptitle(f"{len(rows)} trials; {privacy}", fontsize="large")
    figure.savefig(path, dpi=200)


def _band(axes: Axes, x: list[float], accuracies: np.ndarray, style: dict[str, Any]) -> None:
    """Draw the mean over the first axis (seeds) and a band of ± one standard deviation."""
    mean = 100 * accuracies.mean(axis=0)
    axes.plot(x, mean, **style)
    if len(accuracies) > 1:
        spread = 100 * accuracies.std(axis=0, ddof=1)
        axes.fill_between(
            x, mean - spread, mean + spread, color=style["color"], alpha=0.18, linewidth=0
        )


def _floor(methods: list[dict[str, Any]]) -> float:
    """A lower end of the accuracy axis that leaves room to tell the methods apart."""
    worst = min(method["test_accuracy_mean"] for method in methods)
    return max(0.0, 10 * np.floor(10 * worst - 1.5))


def scientific(value: float) -> str:
    """`value` as a power of ten in mathtext, such as $10^{-5}$."""
    mantissa, exponent = f"{value:.2e}".split("e")
    factor = "" if float(mantissa) == 1 else rf"{float(mantissa):g} \times "
    return rf"${factor}10^{{{int(exponent)}}}$"


def label(axes: Axes, x: str, y: str) -> None:
    """Names both axes, and draws a light grid without the frame above and to the right."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
