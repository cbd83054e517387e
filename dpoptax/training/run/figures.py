"""Draws the figure of one run, with helpers for all figures."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpoptax.runs import to_decimals, to_digits

# Okabe and Ito's colors, distinct with every kind of color vision and in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")


def plot_run(summary: dict[str, Any], history: list[dict[str, Any]], path: Path) -> None:
    """Draws two test metrics and, for a private run, the spent ε over steps."""
    steps = [record["step"] for record in history]
    private = summary["private"]
    figure = Figure(figsize=(10.5 if private else 7.0, 3.2), layout="constrained")
    metrics = [name for name in history[0] if name.startswith("test_")]
    metrics = sorted(metrics, key=lambda name: name != "test_accuracy")[:2]
    *panels, last = figure.subplots(1, len(metrics) + private, squeeze=False)[0]
    for axes, name, color in zip([*panels, last], metrics, COLORS, strict=False):
        axes.plot(steps, [record[name] for record in history], color=color)
        label(axes, "step", name.replace("_", " "))
    guarantee = "no guarantee"
    if private:
        delta = scientific(summary["delta"])
        guarantee = f"ε = {to_decimals(summary['epsilon'], 2)} at δ = {delta}"
        spent = last
        bounds = [record["epsilon"] for record in history]
        spent.plot(steps, bounds, color=COLORS[2], label="spent, at most")
        budget = summary["budget"]
        if budget is not None:
            spent.axhline(budget, color="#666666", linestyle="--", label="budget")
        spent.set_ylim(bottom=0)
        spent.legend(frameon=False, loc="lower right")
        label(spent, "step", f"ε at δ = {delta}")
    figure.suptitle(f"{summary['method']} on {summary['dataset']}, {guarantee}", fontsize="large")
    figure.savefig(path, dpi=200)


def scientific(delta: float) -> str:
    """Formats δ as a power of ten in mathtext, such as $10^{-5}$."""
    mantissa, exponent = f"{float(to_digits(delta)):.2e}".split("e")
    factor = "" if float(mantissa) == 1 else rf"{float(mantissa):g} \times "
    return rf"${factor}10^{{{int(exponent)}}}$"


def signed(value: float, decimals: int = 1) -> str:
    """Formats `value` with its sign."""
    return f"{value:+.{decimals}f}".replace("-", "−")


def label(axes: Axes, x: str, y: str) -> None:
    """Labels both axes, adds a light grid and removes the upper and right frame."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
