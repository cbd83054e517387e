"""Writes the report on the papers: results computed here, and runs not made here."""

import dataclasses
import statistics
from pathlib import Path

from dpoptax.training import Comparison, ConfigError, compare, load_configs
from dpoptax.training.run import records
from dpoptax.training.search.compare import table as comparison_table
from dpoptax.training.search.results import ComparisonResult
from experiments.claims import catalog
from experiments.config import load_experiments
from experiments.figure_files import shrink
from experiments.reports.paper_runs import claims_table

_DIGITS = {
    "DOPPLER": "LP-DPSGD is better than DP-SGD at equal ε (DOPPLER, Fig. 3 and 4; "
    "DP-PMLF, Fig. 1(a), has it worse at ε = 8)",
    "DiSK": "DiSK is better than DP-SGD at equal ε (DiSK, Fig. 1, 2 and 4)",
    "DP-PMLF": "DP-PMLF is better than DP-SGD at equal ε (DP-PMLF, Tables 1 and 3, Fig. 4)",
    "Inner-outer": "DP-SGD with inner and outer momentum is better than without on gray images "
    "(DP-PMLF, Tables 1 and 3; on CIFAR it is far worse with ViT, Table 1, and worse with CNN-5 at "
    "ε = 1, Fig. 1(b))",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """Runs the parts of the papers' experiments that run anywhere, and writes a report.

    The command runs everything that needs neither a GPU nor data. It lists the rest.
    """

    workdir: Path = Path("runs/report")
    """Folder for numbers, records and figures. Results of the same code are reused, so an
    interrupted report continues."""
    output: Path | None = None
    """The Markdown file. Figures are written to reproduction/ next to it. None: REPRODUCTION.md in
    the workdir."""
    configs: Path = Path("configs")
    """Folder with digits/ and papers/."""
    data_dir: Path | None = None
    """Folder with published data. Without it, studies that train on such data are left out."""
    seeds: int = 5
    """Number of repetitions of random computations."""
    digits: bool = True
    """Whether to train on digits, which takes most of the time."""
    epsilon: float = 1.0
    """ε of the comparison on digits."""
    processes: int = 1
    """Number of concurrent runs on digits."""


def write_report(report: Report, *, progress: bool = True) -> Path:
    """Runs the missing parts, writes the report and returns its path.

    Raises:
        ConfigError: The folder has no configs.
    """
    digits = {
        path.stem: config
        for path in sorted(report.configs.glob("digits/*.py"))
        for config in load_configs(path).values()
    }
    papers = sorted(path for path in report.configs.glob("papers/*/*.py") if path.name != "base.py")
    if not (digits and papers):
        raise ConfigError(
            f"`configs` must contain digits/*.py and papers/*/*.py, got {str(report.configs)!r}. "
            "Pass the folder `configs` of the repository."
        )
    output = report.output or report.workdir / "REPRODUCTION.md"
    figures = output.parent / "reproduction"
    figures.mkdir(parents=True, exist_ok=True)

    names = catalog.names_for(report.data_dir)
    findings = catalog.run_studies(
        names,
        report.workdir / "studies",
        seeds=report.seeds,
        configs=report.configs,
        data_dir=report.data_dir,
        progress=progress,
    )
    results = None
    if report.digits:
        comparison = Comparison(
            report.workdir / "digits",
            seeds=report.seeds,
            epsilon=report.epsilon,
            processes=report.processes,
        )
        results = compare(digits, comparison, progress=progress)
        shrink(comparison.workdir / "comparison.png", figures / "digits.png")
    runs = {path: len(load_experiments(path)) for path in papers}

    for name in names:
        shrink(report.workdir / "studies" / f"{name}.png", figures / f"{name}.png")
    output.write_text(_text(report, findings, results, runs), encoding="utf-8")
    return output


def _text(
    report: Report,
    findings: dict[str, list[catalog.Finding]],
    results: ComparisonResult | None,
    runs: dict[Path, int],
) -> str:
    options = f"--seeds {report.seeds} --epsilon {report.epsilon:g}"
    options += "" if report.digits else " --no-digits"
    options += "" if report.data_dir is None else " --data-dir DIR"
    parts = [
        "# Reproduction of the papers' results",
        f"Written by `python -m experiments report {options}`; "
        + ", ".join(f"{name} {version}" for name, version in records.versions().items())
        + ". Every number below was computed by that command.",
        "## In short",
        _summary(findings, results),
        "The update rules of the papers' released code are measured in "
        "[released-code.md](released-code.md).",
        "## Studies",
    ]
    for name, found in findings.items():
        made = catalog.STUDIES[name]
        parts += [
            f"### {made.title}",
            f"{made.source[0].upper()}{made.source[1:]}; "
            f"`python -m experiments study {name}{' --data-dir DIR' if made.dataset else ''}`.",
            catalog.findings_table(found),
            f"![{made.title}](reproduction/{name}.png)",
        ]
    parts += [
        "## Training: the part that runs on any machine",
        *_digits_section(report, results),
        "## Runs that need a GPU and data",
        f"{sum(runs.values())} runs of the papers' tables and figures are configured but were not "
        "trained. `dpoptax plan FILE` prints the operations of a step, and `dpoptax train "
        "FILE:NAME` trains a run.",
        claims_table(runs),
        "Each config file lists the parts of its table or figure that these runs leave out.",
    ]
    return "\n\n".join(parts) + "\n"


def _digits_section(report: Report, results: ComparisonResult | None) -> list[str]:
    command = (
        f"`dpoptax compare configs/digits/*.py --epsilon {report.epsilon:g} --seeds {report.seeds}`"
    )
    if results is None:
        return [f"Left out of this report (`--no-digits`): {command}."]
    return [
        "The papers train on images. Here we train on 1,438 handwritten digits at "
        f"ε = {report.epsilon:g} with {report.seeds} seeds and five learning rates for every "
        f"method: {command}. A claim holds if the mean difference between runs of the same seed is "
        "above twice its standard error.",
        catalog.findings_table(digits_findings(results)),
        comparison_table(results),
        "![Test accuracies and differences from DP-SGD](reproduction/digits.png)",
    ]


def digits_findings(results: ComparisonResult) -> list[catalog.Finding]:
    """Returns the differences from DP-SGD on digits, paired by seed."""
    accuracies = {
        method.name: [100 * accuracy for accuracy in method.accuracies]
        for method in results.methods
    }
    found = []
    for name, claim in _DIGITS.items():
        if name not in accuracies or "DP-SGD" not in accuracies:
            continue
        differences = [
            ours - base for ours, base in zip(accuracies[name], accuracies["DP-SGD"], strict=True)
        ]
        mean, error = statistics.fmean(differences), float("inf")
        if len(differences) > 1:
            error = statistics.stdev(differences) / len(differences) ** 0.5
        text = f"{mean:+.2f} points, standard error {error:.2f}"
        found.append(catalog.Finding(claim, text, "yes" if mean > 2 * error else "not shown"))
    return found


def _summary(findings: dict[str, list[catalog.Finding]], results: ComparisonResult | None) -> str:
    every = [finding for found in findings.values() for finding in found]
    count = {
        verdict: sum(finding.holds == verdict for finding in every)
        for verdict in ("yes", "in part", "no")
    }
    text = (
        f"Of {len(every)} claims about the studies {count['yes']} hold, "
        f"{count['in part']} hold in part and {count['no']} do not."
    )
    if results is not None:
        found = digits_findings(results)
        shown = sum(finding.holds == "yes" for finding in found)
        text += (
            f" On digits, {shown} of {len(found)} methods are shown to be better than DP-SGD at "
            "equal ε."
        )
    return (
        f"{text} Of the papers' results on images, GeoDP's Figure 5 and DP-PMLF's CNN were trained "
        "(experiments/results/on-images.md); the others need a GPU."
    )
