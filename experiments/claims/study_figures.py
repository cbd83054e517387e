"""Draws the figures of the studies from their rows."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dpoptax.training.run.figures import COLORS, label
from experiments.claims.disk_claims import DRIFTS
from experiments.claims.study_rows import Row, over, pick

MARKERS = ("o", "s", "^", "D", "v", "P", "*", "X", "<", ">", "h")

_SYMBOLS = {
    "noise_multiplier": ("σ", "noise multiplier σ"),
    "dimension": ("d", "dimension d"),
    "batch_size": ("B", "batch size B"),
    "beta": ("β", "bounding factor β"),
}
_ERRORS = {
    "geodp_direction": ("GeoDP, direction (rad²)", COLORS[1], "-"),
    "dp_direction": ("DP-SGD, direction (rad²)", COLORS[0], "-"),
    "geodp_gradient": ("GeoDP, gradient", COLORS[1], "--"),
    "dp_gradient": ("DP-SGD, gradient", COLORS[0], "--"),
}


def filters(rows: list[Row]) -> Figure:
    """Draws impulse and frequency responses, a row of panels per table of DOPPLER."""
    figure = Figure(figsize=(9.5, 6.4), layout="constrained")
    panels = figure.subplots(2, 2)
    for (time, frequency), table in zip(panels, (2.0, 4.0), strict=True):
        names = list(dict.fromkeys(pick(rows, "filter", table=table)))
        for index, name in enumerate(names):
            style = {"color": COLORS[index % len(COLORS)], "linewidth": 1.4}
            where = {"table": table, "filter": name}
            steps, weights = (
                pick(rows, column, response="time", **where) for column in ("x", "value")
            )
            if name != "none":  # a single weight of 1, which would flatten all others
                time.plot(steps, weights, marker=MARKERS[index], markersize=3.5, **style)
            omega, decibel = (
                pick(rows, column, response="frequency", **where) for column in ("x", "value")
            )
            marks = {"marker": MARKERS[index], "markersize": 3.5, "markevery": 40}
            frequency.plot(omega, decibel, label=name, **marks, **style)
        label(time, "steps ago", "weight κ")
        frequency.legend(
            frameon=False, fontsize="small", title=f"Table {table:g}", loc="lower left"
        )
        frequency.set(xscale="log", ylim=(-60, 6), xlim=(1e-3, np.pi))
        label(frequency, "frequency (radians per step)", "amplitude (dB)")
    panels[0][0].set_title("Time response", fontsize="medium")
    panels[0][1].set_title("Frequency response", fontsize="medium")
    figure.suptitle("Filters of DOPPLER's tables 2 and 4", fontsize="large")
    return figure


def geodp_noise(rows: list[Row]) -> Figure:
    """Draws the nine panels of GeoDP Fig. 3."""
    figure = Figure(figsize=(10, 8.6), layout="constrained")
    _error_panels(figure, figure.subplots(3, 3, sharey="row").ravel(), rows)
    return figure


def geodp_beta(rows: list[Row]) -> Figure:
    """Draws the three panels of GeoDP Fig. 4."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    _error_panels(figure, figure.subplots(1, 3, sharey=True), rows)
    return figure


def _error_panels(figure: Figure, panels: Any, rows: list[Row]) -> None:
    for index, (panel, axes) in enumerate(
        zip(sorted(set(pick(rows, "panel"))), panels, strict=True)
    ):
        varies, fixed = (str(pick(rows, name, panel=panel)[0]) for name in ("varies", "fixed"))
        for name, (text, color, line) in _ERRORS.items():
            x, errors = over(rows, "x", name, panel=panel)
            band(axes, x, errors, {"color": color, "linestyle": line, "label": text})
        axes.set(xscale="log", yscale="log")
        if varies == "beta":
            axes.set_xticks(x, [f"{value:g}" for value in x])
            axes.xaxis.set_minor_locator(NullLocator())
        label(axes, _SYMBOLS[varies][1], "" if index % 3 else "mean square error")
        for name, (symbol, _) in _SYMBOLS.items():
            fixed = fixed.replace(name, symbol)
        axes.set_title(f"({panel}) {fixed}", fontsize="medium")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(f"Noise as published, C = 0.1, ‖ḡ‖ = 0.01 C; {_spread(rows)}", fontsize="large")


def geodp_mnist(rows: list[Row]) -> Figure:
    """Draws the training losses over the steps for each panel of GeoDP Fig. 5."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, 3, sharey=True), "abc", strict=True):
        curves = dict.fromkeys(
            (row["noise_multiplier"], row["method"], row["batch_size"])
            for row in rows
            if row["panel"] == panel
        )
        for index, (sigma, method, size) in enumerate(curves):
            where = {"noise_multiplier": sigma, "method": method, "batch_size": size}
            x, losses = over(rows, "step", "training_loss", panel=panel, **where)
            text = "no noise" if method == "none" else _curve_name(method, sigma, size)
            style: dict[str, Any] = {"color": COLORS[index - 1], "label": text}
            if method == "none":  # DP's curve hides it where the noise has no effect
                style |= {"color": "black", "linestyle": "--", "zorder": 3}
            band(axes, x, losses, style)
        axes.set(yscale="log")
        axes.set_yticks([0.5, 1, 2, 4], ["0.5", "1", "2", "4"])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False, fontsize="small")
        axes.set_title(f"({panel})", fontsize="medium")
        label(axes, "step", "training loss" if panel == "a" else "")
    figure.suptitle(
        f"Logistic regression on MNIST, C = 0.1, learning rate 10; {_spread(rows)}",
        fontsize="large",
    )
    return figure


def _curve_name(method: str, sigma: float, size: float) -> str:
    name, _, beta = method.partition("_")
    shown = f"GeoDP, β = {beta}" if name == "geodp" else "DP"
    return f"{shown}, σ = {sigma:g}, B = {size:g}"


def kalman_gain(rows: list[Row]) -> Figure:
    """Draws gain and error variance over steps, with limits and measured errors."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    gain, variance = figure.subplots(1, 2)
    for index, drift in enumerate(DRIFTS):
        color = COLORS[index]
        for start, line in ((0.0, "-"), (1.0, "--")):
            where = {"drift": drift, "start": start}
            for axes, column in ((gain, "gain"), (variance, "variance")):
                steps, values = over(rows, "step", column, **where)
                text = f"σ$_v$ = {drift:g} σ$_w$" if start == 0.0 else None
                axes.plot(steps, values[0], color=color, linestyle=line, label=text)
        for axes, column in ((gain, "gain_limit"), (variance, "variance_limit")):
            axes.axhline(
                pick(rows, column, drift=drift)[0], color=color, linewidth=0.9, linestyle=":"
            )
        steps, measured = over(rows, "step", "measured", drift=drift, start=1.0)
        middle = measured.mean(0)
        variance.errorbar(
            steps[::10],
            middle[::10],
            [(middle - measured.min(0))[::10], (measured.max(0) - middle)[::10]],
            color=color,
            marker="o",
            markersize=3,
            linestyle="none",
            linewidth=1,
        )
    label(gain, "step t", "gain $k_t$")
    label(variance, "step t", "error variance $p_t$ (of σ$_w^2$)")
    variance.set(yscale="log")
    gain.set(ylim=(0, None))
    handles, labels = gain.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    figure.suptitle(
        "DiSK's recursion from $p_{-1}$ = 0 (solid) and σ$_w^2$ (dashed), closed form (dotted),\n"
        f"measured (points: {_spread(rows)})",
        fontsize="medium",
    )
    return figure


def noisy_regression(rows: list[Row]) -> Figure:
    """Draws the excess loss over the noise and over the learning rate."""
    figure = Figure(figsize=(10.5, 4), layout="constrained")
    fixed, tuned, rates = figure.subplots(1, 3)
    loudest = pick(rows, "noise").max()
    largest = pick(rows, "learning_rate").max()
    for index, method in enumerate(dict.fromkeys(pick(rows, "method"))):
        style = {"color": COLORS[index], "marker": MARKERS[index], "label": method}
        levels, losses = over(rows, "noise", "excess_loss", method=method, learning_rate=largest)
        band(fixed, levels, losses, style)
        best = []
        for noise in levels:
            grid, at = over(rows, "learning_rate", "excess_loss", method=method, noise=noise)
            best.append(at[:, at.mean(0).argmin()])
        band(tuned, levels, np.stack(best, axis=1), style)
        grid, at = over(rows, "learning_rate", "excess_loss", method=method, noise=loudest)
        band(rates, grid, at, style)
    noise = "noise in each coordinate (standard deviation)"
    for axes, x, title in (
        (fixed, noise, f"At learning rate {largest:g}"),
        (tuned, noise, "At each one's best learning rate"),
        (rates, "learning rate", f"At noise {loudest:g}"),
    ):
        axes.set(xscale="log", yscale="log")
        label(axes, x, "excess loss" if axes is fixed else "")
        axes.set_title(title, fontsize="medium")
    handles, labels = fixed.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"Linear regression, 20 parameters, curvature about 1; {_spread(rows)}", fontsize="large"
    )
    return figure


def release_cosines(rows: list[Row]) -> Figure:
    """Draws the cosine over the noise, one line per geometry."""
    figure = Figure(figsize=(6.6, 4.4), layout="constrained")
    axes = figure.subplots()
    for index, name in enumerate(dict.fromkeys(pick(rows, "geometry"))):
        x, cosines = over(rows, "noise_multiplier", "cosine", geometry=name)
        band(
            axes,
            x,
            cosines,
            {"color": COLORS[index], "marker": MARKERS[index], "label": name},
        )
    axes.set_xscale("symlog", linthresh=0.5)
    axes.set_xticks([0, 0.5, 1, 2, 4, 8], ["0", "0.5", "1", "2", "4", "8"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axhline(0, color="#666666", linewidth=0.8)
    label(axes, "noise multiplier σ", "cosine with the true direction")
    figure.legend(
        *axes.get_legend_handles_labels(), frameon=False, loc="outside right center", title="clip"
    )
    figure.suptitle(f"256 gradients of 500 coordinates; {_spread(rows)}", fontsize="medium")
    return figure


def band(axes: Axes, x: np.ndarray, values: np.ndarray, style: dict[str, Any]) -> None:
    """Draws the mean over the first axis (seeds) and a band from minimum to maximum."""
    finite = np.where(np.isfinite(values), values, np.nan)
    axes.plot(x, finite.mean(0), **{"markersize": 4, "linewidth": 1.4, **style})
    axes.fill_between(
        x, finite.min(0), finite.max(0), color=style["color"], alpha=0.18, linewidth=0
    )


def _spread(rows: list[Row]) -> str:
    seeds = np.unique(pick(rows, "seed")).size
    return f"mean and range of {seeds} seeds" if seeds > 1 else "one seed"
