"""Writes results as JSON, Markdown and figures."""

import json
import math
import os
import platform
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullLocator

from dpoptax.training.run.files import markdown_table

HEADER = (
    *("", "ms/step", "quartiles", "ratio", "interval", "compile s", "peak MB"),
    "memory ratio",
)


def save(results, facts: dict, folder: Path) -> str:
    """Writes the results as JSON, Markdown and figures; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [asdict(result) for result in results]
    text = json.dumps({"facts": facts, "results": rows}, indent=1)
    (folder / "results.json").write_text(text + "\n")
    markdown = to_markdown(results, facts)
    (folder / "results.md").write_text(markdown)
    tables = [group for cell, group in _by_cell(results) if not cell.sweep]
    if any(result.ratio for group in tables for result in group):
        draw_ratios(tables, folder / "ratios.png")
    sweeps = [result for result in results if result.cell.sweep and result.error is None]
    if sweeps:
        draw_sweeps(sweeps, folder / "sweeps.png")
    return markdown


def to_markdown(results, facts: dict) -> str:
    """Returns a summary of ratios, then one table for each cell."""
    parts = [", ".join(f"{name} {value}" for name, value in facts.items()) + ".\n"]
    parts.append(_summary([result for result in results if not result.cell.sweep]))
    for cell, group in _by_cell(results):
        baselines = {result.baseline for result in group if result.baseline}
        title = f"{cell.sweep} sweep: {cell}" if cell.sweep else str(cell)
        parts.append(f"### {title}\n\nRatios to: {'; '.join(sorted(baselines)) or 'none'}.\n")
        parts.append(markdown_table(HEADER, map(_row, group)) + "\n")
    return "\n".join(parts)


def _summary(results):
    """Returns a table of ratios with a row per step and a column per cell.

    A row takes the fastest size of each cell. Steps of dpoptax have one more row, by default.
    """
    cells = list(dict.fromkeys(str(result.cell) for result in results))
    if not cells:
        return ""
    found: dict[tuple[str, str], str] = {}
    for result in sorted(results, key=lambda result: result.ratio or math.inf):
        variant, cell = result.variant, str(result.cell)
        if variant.library.startswith("dpoptax") and variant.microbatch_size is None:
            found[cell, f"{variant}, default size"] = _ratio(result)
        else:
            found.setdefault((cell, variant.step), _ratio(result))
    names = dict.fromkeys(name for _, name in found)
    rows = [(name, *(found.get((cell, name), "") for cell in cells)) for name in names]
    return markdown_table(("time, ratio to non-private", *cells), rows) + "\n"


def _ratio(result):
    return "failed" if result.error else f"{result.ratio:.2f}" if result.ratio else "–"


def _row(result):
    name = str(result.variant)
    if result.error is not None:
        return (name, f"failed: {result.error.replace('|', '/')}", *[""] * 6)
    low, high = result.quartiles
    seconds = "" if result.compile_seconds is None else f"{result.compile_seconds:.1f}"
    memory = f"{result.memory_ratio:.2f}" if result.memory_ratio else "–"
    interval = "–" if result.interval is None else "{:.2f}–{:.2f}".format(*result.interval)
    times = f"{result.median:.2f}", f"{low:.2f}–{high:.2f}", _ratio(result), interval
    return (name, *times, seconds, f"{result.peak_mb:.0f}", memory)


def draw_ratios(groups, path: Path) -> None:
    """Draws one panel per cell with a bar per variant, on a logarithmic scale."""
    columns = min(3, math.ceil(math.sqrt(len(groups))))
    lines = -(-len(groups) // columns)
    height = 0.28 * max(len(group) for group in groups) + 0.9
    figure, axes = plt.subplots(
        lines, columns, figsize=(5.5 * columns, height * lines), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, group in zip(axes.flat, groups, strict=False):
        group = [result for result in group if result.ratio]
        names = [str(result.variant) for result in group]
        bars = axis.barh(names, [r.ratio for r in group], color=[_color(r.variant) for r in group])
        axis.bar_label(
            bars, fmt=lambda x: f"{x:.3g}" if x < 100 else f"{x:.0f}", padding=2, fontsize=8
        )
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", title=str(group[0].cell) if group else "")
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.tick_params(labelsize=8)
    figure.supxlabel("time of a step, ratio to the fastest non-private step", fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_sweeps(results, path: Path) -> None:
    """Draws milliseconds per step, one panel per sweep and one line per variant."""
    names = list(dict.fromkeys(result.cell.sweep for result in results))
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.5 * len(names), 3.8), squeeze=False, layout="constrained"
    )
    for axis, name in zip(axes.flat, names, strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            if result.cell.sweep == name and result.steps:
                point = (_quantity(result.cell), result.median)
                lines.setdefault(str(result.variant), []).append(point)
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(xscale="log", yscale="log", xlabel=_LABELS[name], ylabel="ms a step")
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axis.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=120)
    plt.close(figure)


_LABELS = {
    "batch": "examples in a batch (transformer)",
    "parameters": "width of the MLP, batch 256",
    "length": "sequence length (transformer, batch 16)",
    "points": "gradient points (DP-PMLF, transformer, batch 32)",
}


def _quantity(cell):
    if cell.sweep == "batch":
        return cell.batch_size
    return cell.points if cell.sweep == "points" else next(iter(cell.options.values()))


def _color(variant):
    if variant.is_baseline:
        return "#999999"
    return "#1f77b4" if variant.library.startswith("dpoptax") else "#ff7f0e"


def _by_cell(results):
    groups: dict[tuple, list] = {}
    for result in results:
        groups.setdefault((result.cell.sweep, str(result.cell)), []).append(result)
    return [(group[0].cell, group) for group in groups.values()]


def machine_facts() -> dict:
    """Returns facts that affect the numbers and may be published."""
    cores = len(os.sched_getaffinity(0))
    packages = {name: version(name) for name in ("jax", "optax", "jax-privacy")}
    return {"Python": platform.python_version(), **packages, "CPU cores": cores}
