"""Writes the page on methods on images from the records of comparisons."""

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path

import tyro

from dpoptax.training import ConfigError
from dpoptax.training.run import files
from experiments.figure_files import shrink
from experiments.image_benchmark.page_figures import plot_accuracies, plot_differences
from experiments.image_benchmark.page_groups import (
    BASELINE,
    MOMENTUM,
    Entry,
    Groups,
    Setting,
    data_name,
    difference,
    grouped,
    named,
    titles,
)
from experiments.image_benchmark.published_accuracies import PUBLISHED
from experiments.image_benchmark.run_lines import Line, read
from experiments.spreads import mean_and_interval


def write_page(folder: tyro.conf.Positional[Path], *, output: Path | None = None) -> Path:
    """Writes the page on methods on images from the records of comparisons; returns its path.

    The summary and the list of omissions are written by hand: the page includes `verdict.md` and
    `cut.md` if the folder has them.

    Args:
        folder: Folder with the files that `record` writes. The figures are also written there.
        output: The Markdown file. By default it is next to the folder and has its name.

    Raises:
        ConfigError: The folder has no records, or a line is not a record.
    """
    paths = sorted(folder.glob("*.jsonl"))
    found = [line for path in paths for line in read(path)]
    if not found:
        raise ConfigError(
            f"`folder` must contain records, got {str(folder)!r}. Write records with python -m "
            f"experiments record WORKDIR --output {folder / 'NAME.jsonl'}."
        )
    output = output or folder.with_suffix(".md")
    groups = grouped(found)
    compared = {s: e for s, e in groups.items() if named(e, BASELINE)}
    alone = {s: e for s, e in groups.items() if s not in compared}
    plot_accuracies(compared, alone, folder / "accuracies.png")
    drawn = ["accuracies"]
    if _has_differences(compared):
        plot_differences(compared, folder / "differences.png")
        drawn.append("differences")
    for name in drawn:
        shrink(folder / f"{name}.png", folder / f"{name}.png")
    output.write_text(_text(folder, output, found, compared, alone), encoding="utf-8")
    return output


def _text(folder: Path, output: Path, found: list[Line], compared: Groups, alone: Groups) -> str:
    where = folder.relative_to(output.parent) if folder.is_relative_to(output.parent) else folder
    parts = [
        "# Methods on images",
        f"Written by `python -m experiments image-benchmark {folder}` from {len(found)} runs. It "
        f"uses only the records of `python -m experiments record` in `{folder}`.",
        *_given(folder / "verdict.md", "## In short", output),
        f"![Test accuracy over ε, with published numbers]({where}/accuracies.png)",
    ]
    if _has_differences(compared):
        parts += [
            "## Differences from DP-SGD",
            _counted(compared),
            f"![Differences from DP-SGD with their intervals]({where}/differences.png)",
            "Green intervals are above zero, and orange ones are below. Methods far outside are at "
            "the edge, with their mean. Intervals use Student's t over the differences of equal "
            "seeds.",
            "Methods and their hyper-parameters are those of `configs/benchmark`.",
        ]
    headings = titles(compared)
    for setting, entries in compared.items():
        parts += [f"### {headings[setting]}", _described(setting), _table(entries)]
    if alone:
        parts += ["## Recipes, and the same without privacy", _recipes(alone)]
    parts += ["## Published numbers", _published(compared | alone)]
    parts += _given(folder / "cut.md", "## What was left out, and why", output)
    parts += ["## Made with", _made_with(found)]
    return "\n\n".join(parts) + "\n"


def _has_differences(compared: Groups) -> bool:
    """Returns whether any method is compared with DP-SGD."""
    return any(len(entries) > 1 for entries in compared.values())


def _given(path: Path, heading: str, output: Path) -> list[str]:
    """Returns a heading and the text of a file, with relative links that work in the page."""
    if not path.is_file():
        return []

    def moved(link: re.Match[str]) -> str:
        target = os.path.relpath(path.parent / link[1], output.parent)
        return f"]({Path(target).as_posix()}"

    text = path.read_text(encoding="utf-8").strip()
    return [heading, re.sub(r"\]\((?!\w+:|#)([^)#\s]+)", moved, text)]


def _described(setting: Setting) -> str:
    features = "" if setting.features == "none" else f" on {setting.features} features"
    order = "; batches come in a fixed order, without amplification" if setting.in_order else ""
    return (
        f"Model {setting.model}{features}, B = {setting.batch_size}, {setting.steps} steps{order}."
    )


def _counted(compared: Groups) -> str:
    """Counts how often each method is above and below DP-SGD and tuned momentum."""
    tally: dict[str, list[list[int]]] = {}
    for entries in compared.values():
        for entry in entries:
            if entry.label == BASELINE:
                continue
            verdicts = tally.setdefault(entry.label, [[], []])
            for kept, other in zip(verdicts, (BASELINE, MOMENTUM), strict=True):
                reference = named(entries, other)
                if reference is not None and reference is not entry:
                    kept.append(difference(entry, reference).verdict)
    rows = [
        (label, *(f"{v.count(1)}, {v.count(-1)} of {len(v)}" if v else "" for v in verdicts))
        for label, verdicts in tally.items()
    ]
    head = ("method", "above, below DP-SGD", "above, below momentum")
    return (
        "Number of settings where the 95 % interval of the difference is above and below zero. By "
        "chance, each happens in one of forty settings.\n\n" + files.markdown_table(head, rows)
    )


def _table(entries: Sequence[Entry]) -> str:
    head = (
        *("method", "test accuracy, %", "from DP-SGD", "from momentum"),
        *("rate", "gradients of an example in a step"),
    )
    rows = []
    for entry in sorted(entries, key=lambda entry: -entry.mean):
        rate = f"{entry.learning_rate:g}" + (", at the edge" if entry.at_edge else "")
        rows.append(
            (
                _marked(entry),
                entry.accuracy,
                *(_interval(entry, named(entries, other)) for other in (BASELINE, MOMENTUM)),
                rate,
                str(entry.gradients),
            )
        )
    table = _with_notes(files.markdown_table(head, rows), entries)
    seeds = " to ".join(map(str, sorted({len(entry.accuracies) for entry in entries})))
    tried = " to ".join(map(str, sorted({len(entry.rates) for entry in entries})))
    return f"Seeds: {seeds}; learning rates tried on held-out training data: {tried}.\n\n{table}"


def _marked(entry: Entry) -> str:
    """Returns the label with the marks that `_with_notes` explains."""
    return entry.label + " ¹" * entry.unproven + " ²" * entry.zeroed


def _with_notes(table: str, entries: Sequence[Entry]) -> str:
    if any(entry.unproven for entry in entries):
        table += "\n\n¹ No ε is proven; the noise is that of DP-SGD at this ε."
    if any(entry.zeroed for entry in entries):
        table += (
            "\n\n² ε is for one example that is replaced by one that adds nothing; without the "
            "mark it is for one more or less, or as the heading says."
        )
    return table


def _interval(entry: Entry, other: Entry | None) -> str:
    if other is None or other is entry:
        return ""
    return mean_and_interval(*difference(entry, other))


def _recipes(alone: Groups) -> str:
    rows = []
    for setting, entries in alone.items():
        for entry in entries:
            epsilon = "∞" if math.isinf(setting.epsilon) else f"{setting.epsilon:g}"
            features = "" if setting.features == "none" else f"{setting.features} + "
            rows.append(
                (
                    data_name(setting.dataset),
                    f"{features}{setting.model}",
                    _marked(entry),
                    epsilon + setting.stated,
                    str(setting.batch_size),
                    str(setting.steps),
                    f"{entry.learning_rate:g}",
                    entry.accuracy,
                    str(len(entry.accuracies)),
                )
            )
    head = ("data", "model", "method", "ε", "B", "steps", "rate", "test accuracy, %", "seeds")
    every = [entry for entries in alone.values() for entry in entries]
    return _with_notes(files.markdown_table(head, rows), every)


def _published(groups: Groups) -> str:
    """Lists published numbers next to our best at an ε that is at most 3 % larger."""
    rows = []
    for number, point in enumerate(PUBLISHED, 1):
        ours = [
            (entry.mean, setting.epsilon, f"{setting.epsilon:g}{setting.stated} ({_marked(entry)})")
            for setting, entries in groups.items()
            for entry in entries
            if setting.dataset == point.dataset and setting.epsilon <= point.epsilon * 1.03
            if not entry.unproven
        ]
        beside = ""
        if ours:
            mean, _, where = max(ours)
            beside = f"{mean:.2f} at ε = {where}"
        rows.append(
            (
                str(number),
                data_name(point.dataset).replace(", JPEG", ""),
                f"{point.epsilon:g}",
                f"{point.accuracy:g}",
                point.what,
                point.source,
                beside,
            )
        )
    head = ("", "data", "ε", "published, %", "of", "source", "best here, at that ε or 3 % more, %")
    proven = [entry for entries in groups.values() for entry in entries if not entry.unproven]
    return _with_notes(files.markdown_table(head, rows), proven)


def _made_with(found: Sequence[Line]) -> str:
    versions = {
        ", ".join(f"{name} {version}" for name, version in line.versions.items()) for line in found
    }
    code = sorted({line.code for line in found})
    return (
        f"{'; '.join(sorted(versions))}. SHA-256 of the package's source begins with "
        f"{', '.join(code)}."
    )
