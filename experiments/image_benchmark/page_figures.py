"""Draws accuracy over ε with published numbers, and differences from DP-SGD."""

import itertools
import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullLocator

from dpoptax.training.run.figures import COLORS, label, signed
from experiments.image_benchmark.page_groups import (
    BASELINE,
    Entry,
    Groups,
    Setting,
    data_name,
    difference,
    named,
    titles,
    told_apart,
)
from experiments.image_benchmark.published_accuracies import PUBLISHED, Published

_GRAY = "#777777"
_FAR = 3.0
# Methods beyond this multiple of the usual distance from zero are named at the panel's edge.


def plot_accuracies(groups: Groups, recipes: Groups, path: Path) -> None:
    """Draws accuracy over ε for each data set: methods, recipes and published numbers.

    Methods are shown at the largest number of steps. Methods on features are lines, one for each
    model and batch size. For a model without features, the best method is a point. Methods without
    a proof are left out.
    """
    datasets = list(dict.fromkeys(setting.dataset for setting in (*groups, *recipes)))
    figure = Figure(figsize=(6.4 * len(datasets), 4.6), layout="constrained")
    panels = figure.subplots(1, len(datasets), squeeze=False)[0]
    for axes, dataset in zip(panels, datasets, strict=True):
        draw_accuracies(axes, groups, recipes, dataset)
    figure.savefig(path, dpi=140)


def draw_accuracies(axes: Axes, groups: Groups, recipes: Groups, dataset: str) -> None:
    """Draws the panel of one data set."""
    own = {s: e for s, e in groups.items() if s.dataset == dataset and not s.in_order}
    finite = {s: e for s, e in own.items() if math.isfinite(s.epsilon)}
    private = {s: e for s, e in finite.items() if s.features != "none"} or finite
    kinds = dict.fromkeys(map(_line_of, private))
    colors = dict(zip(kinds, itertools.cycle((COLORS[0], *COLORS[3:])), strict=False))
    free = [s for s in recipes if s.dataset == dataset and math.isinf(s.epsilon)]
    names = told_apart({s: _kind(s) for s in (*finite, *free)}, batch_size="B =")
    for kind, color in colors.items():
        of_kind = {s: e for s, e in private.items() if _line_of(s) == kind}
        _over_epsilon(axes, of_kind, color, names)
    proven = {
        setting: [entry for entry in entries if not entry.unproven]
        for setting, entries in recipes.items()
        if setting.dataset == dataset
    }
    label_once: str | None = "recipe, here"
    for setting, entries in proven.items():
        if entries and math.isfinite(setting.epsilon):
            star = {"marker": "*", "markersize": 13, "color": COLORS[1]}
            _best(axes, setting, entries, **star, label=label_once)
            label_once = None
    for setting, entries in finite.items():
        if setting not in private:
            name = f"best of {len(entries)}, {names[setting]}"
            shown = [entry for entry in entries if not entry.unproven]
            _best(axes, setting, shown, marker="D", markersize=6, color=COLORS[2], label=name)
    for setting, entries in proven.items():
        if math.isinf(setting.epsilon):
            accuracy = max(entry.mean for entry in entries)
            of_features = [colors[kind] for kind in colors if kind[0] == setting.features]
            name, color = f"not private, {names[setting]}", (*of_features, _GRAY)[0]
            axes.axhline(accuracy, color=color, linestyle="--", linewidth=1, label=name)
    _published(axes, dataset)
    axes.set_xscale("log")
    axes.set_xticks([1, 2, 3, 4, 8], ["1", "2", "3", "4", "8"])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(0.85, 9.5)
    label(axes, "ε", "test accuracy (%)")
    axes.set_title(data_name(dataset), fontsize="medium")
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2)


def _best(axes: Axes, setting: Setting, entries: Sequence[Entry], **style: Any) -> None:
    accuracy = max(entry.mean for entry in entries)
    axes.plot([setting.epsilon], [accuracy], linestyle="none", **style)


def _line_of(setting: Setting) -> tuple[Hashable, ...]:
    """Returns the settings that the points of a line share, without ε and steps."""
    of_epsilon = setting.delta, setting.replaced
    return setting.features, setting.model, setting.batch_size, *of_epsilon


def _kind(setting: Setting) -> str:
    features = "" if setting.features == "none" else f" on {setting.features}"
    return f"{setting.model}{features}, {setting.steps} steps{setting.stated}"


def _over_epsilon(axes: Axes, settings: Groups, color: str, names: dict[Setting, str]) -> None:
    """Draws a line per method at the largest number of steps; DP-SGD is in `color`."""
    last = max(settings, key=lambda setting: setting.steps)
    shown = {s.epsilon: e for s, e in sorted(settings.items()) if s.steps == last.steps}
    proven = {
        epsilon: [entry for entry in entries if not entry.unproven]
        for epsilon, entries in shown.items()
    }
    labels = list(dict.fromkeys(entry.label for entries in proven.values() for entry in entries))
    for name in reversed(labels):
        line = {
            epsilon: entry.mean
            for epsilon, entries in proven.items()
            if (entry := named(entries, name)) is not None
        }
        base = name == BASELINE
        axes.plot(
            list(line),
            list(line.values()),
            color=color if base else "#999999",
            linewidth=2.2 if base else 0.9,
            marker="o",
            markersize=6 if base else 3.5,
            zorder=3 if base else 2,
            label=f"DP-SGD, {names[last]}" if base else None,
        )
    others = len(set(labels) - {BASELINE})
    if others:
        name = f"{others} other methods"
        axes.plot([], [], color="#999999", marker="o", markersize=3.5, label=name)


def _published(axes: Axes, dataset: str) -> None:
    """Draws points with their numbers in the table; coinciding points share a label."""
    places: dict[tuple[float, int], list[tuple[int, Published]]] = {}
    for number, point in enumerate(PUBLISHED, 1):
        if point.dataset == dataset:
            place = point.epsilon, round(point.accuracy)
            places.setdefault(place, []).append((number, point))
    for members in places.values():
        points = [point for _, point in members]
        x, y = [point.epsilon for point in points], [point.accuracy for point in points]
        axes.plot(x, y, linestyle="none", marker="x", markersize=5, color="#222222", zorder=4)
        axes.annotate(
            ", ".join(str(number) for number, _ in members),
            (x[0], sum(y) / len(y)),
            xytext=(9, 0),  # next to a recipe's star at the same point
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="#222222",
            zorder=5,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )
    label = "published, by number in the table"
    axes.plot([], [], linestyle="none", marker="x", color="#222222", label=label)


def plot_differences(groups: Groups, path: Path) -> None:
    """Draws differences from DP-SGD with 95 % intervals, a panel per setting.

    At least one setting must compare a method with DP-SGD. Each method has a row.
    """
    shown = [(s, e) for s, e in groups.items() if len(e) > 1]
    labels = list(dict.fromkeys(entry.label for _, entries in shown for entry in entries))
    labels.remove(BASELINE)
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    size = (2.2 + 3.3 * columns, rows * (1.0 + 0.25 * len(labels)))
    figure = Figure(figsize=size, layout="constrained")
    panels: Any = figure.subplots(rows, columns, squeeze=False, sharey=True)
    headings = titles(setting for setting, _ in shown)
    for axes, (setting, entries) in zip(panels.ravel(), shown, strict=False):
        _differences(axes, entries, labels)
        baseline = named(entries, BASELINE)
        assert baseline is not None
        heading = headings[setting].replace(", ε", "\nε")
        axes.set_title(f"{heading}\nDP-SGD {baseline.mean:.2f} %", fontsize="small")
    for axes in panels.ravel()[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("difference from DP-SGD in points, 95 % interval", fontsize="medium")
    figure.savefig(path, dpi=140)


def _differences(axes: Axes, entries: list[Entry], labels: list[str]) -> None:
    baseline = named(entries, BASELINE)
    assert baseline is not None
    found = {
        entry.label: difference(entry, baseline) for entry in entries if entry.label != BASELINE
    }
    reach = {
        name: abs(d.mean) + (d.half if math.isfinite(d.half) else 0.0) for name, d in found.items()
    }
    far = _FAR * float(np.median(list(reach.values()) or [1.0]))
    limit = max([0.1, *(extent for extent in reach.values() if extent <= far)])
    axes.axvline(0, color="#BBBBBB", linewidth=1, zorder=0)
    for row, name in enumerate(labels):
        if name not in found:
            continue
        d = found[name]
        color = {1: COLORS[2], 0: _GRAY, -1: COLORS[1]}[d.verdict]
        if reach[name] > far:
            edge = math.copysign(limit, d.mean)
            text = f"◂ {signed(d.mean)}" if edge < 0 else f"{signed(d.mean)} ▸"
            side = "left" if edge < 0 else "right"
            axes.text(edge, row, text, ha=side, va="center", fontsize=8, color=color)
            continue
        axes.errorbar(
            d.mean, row, xerr=min(d.half, limit), color=color, fmt="o", markersize=4, capsize=2
        )
    axes.set_xlim(-1.1 * limit, 1.1 * limit)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    label(axes, "", "")
    axes.grid(visible=False, axis="y")
