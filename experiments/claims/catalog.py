"""Runs studies by name: numbers, a figure, and the finding for each claim."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from dpoptax.training.bars import Bar
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import records
from experiments.claims import (
    disk_claims,
    doppler_claims,
    geodp_claims,
    geodp_mnist_claims,
    other_claims,
    study_figures,
)
from experiments.claims.study_rows import Findings, Parts, Row
from experiments.code_version import source_sha256


class Finding(NamedTuple):
    """A claim and the result.

    Attributes:
        claim: The claim of the source, in our words.
        found: The numbers computed here.
        holds: "yes", "no" or "in part".
    """

    claim: str
    found: str
    holds: str


class Study(NamedTuple):
    """A study, which produces one figure.

    Attributes:
        title: Its heading.
        source: Paper and figure, or a note that no paper has it.
        parts: Returns the parts of the work for a number of seeds. Each part is a function that
            returns rows. A study that trains also takes the folders of configs and of data.
        draw: Draws the rows.
        findings: Compares the claims with the rows.
        dataset: Name of the published data that the study trains on, if any.
    """

    title: str
    source: str
    parts: Callable[..., Parts]
    draw: Callable[[list[Row]], Figure]
    findings: Callable[[list[Row]], Findings]
    dataset: str | None = None


STUDIES: dict[str, Study] = {
    "filters": Study(
        "Time and frequency response of the filters",
        "DOPPLER, Fig. 6",
        doppler_claims.filters,
        study_figures.filters,
        doppler_claims.filters_findings,
    ),
    "geodp-noise": Study(
        "Errors of GeoDP as published, against σ, d and B",
        "GeoDP, Fig. 3",
        geodp_claims.geodp_noise,
        study_figures.geodp_noise,
        geodp_claims.geodp_noise_findings,
    ),
    "geodp-beta": Study(
        "Errors of GeoDP as published, against β",
        "GeoDP, Fig. 4",
        geodp_claims.geodp_beta,
        study_figures.geodp_beta,
        geodp_claims.geodp_beta_findings,
    ),
    "kalman-gain": Study(
        "Gain and error variance of DiSK's filter converge",
        "DiSK, Fig. 3",
        disk_claims.kalman_gain,
        study_figures.kalman_gain,
        disk_claims.kalman_gain_findings,
    ),
    "noisy-regression": Study(
        "Linear regression with noisy gradients",
        "DiSK, Fig. 6(a)",
        disk_claims.noisy_regression,
        study_figures.noisy_regression,
        disk_claims.noisy_regression_findings,
    ),
    "release-cosines": Study(
        "Direction of a release, per clip geometry, at equal privacy",
        "in no paper; GeoDP's claim for its proven counterpart",
        other_claims.release_cosines,
        study_figures.release_cosines,
        other_claims.release_cosines_findings,
    ),
    "geodp-mnist": Study(
        "Logistic regression on MNIST",
        "GeoDP, Fig. 5",
        geodp_mnist_claims.geodp_mnist,
        study_figures.geodp_mnist,
        geodp_mnist_claims.geodp_mnist_findings,
        dataset="mnist",
    ),
}
"""The studies by their names on the command line."""


def names_for(data_dir: Path | None) -> tuple[str, ...]:
    """Returns the names of the studies that can run: all if `data_dir` is given."""
    return tuple(n for n, study in STUDIES.items() if study.dataset is None or data_dir is not None)


def run_studies(
    names: Sequence[str],
    workdir: Path,
    *,
    seeds: int = 5,
    configs: Path = Path("configs"),
    data_dir: Path | None = None,
    progress: bool = True,
) -> dict[str, list[Finding]]:
    """Computes and draws studies, and returns their findings by name.

    Writes NAME.csv with all numbers, NAME.png and NAME.md for each study. Reads the numbers from
    their file if the same code computed them before for the same number of seeds.

    Raises:
        ConfigError: The name is unknown, `seeds` is below 1, or a study that trains has no data.
    """
    for name in names:
        if name not in STUDIES:
            raise unknown_name("study", name, STUDIES)
    records.check_count("seeds", seeds)
    parts = {name: _parts(name, seeds, configs, data_dir) for name in names}
    workdir.mkdir(parents=True, exist_ok=True)
    found = {}
    with Bar(total=sum(map(len, parts.values())), unit="part", disable=not progress) as bar:
        for name in names:
            bar.set_description(name)
            study = STUDIES[name]
            rows = _rows(name, parts[name], workdir / f"{name}.csv", seeds, bar)
            study.draw(rows).savefig(workdir / f"{name}.png", dpi=150)
            found[name] = [Finding(*finding) for finding in study.findings(rows)]
            text = f"# {study.title}\n\n{study.source}.\n\n{findings_table(found[name])}\n"
            (workdir / f"{name}.md").write_text(text, encoding="utf-8")
    return found


def findings_table(findings: Sequence[Finding]) -> str:
    """Returns the findings as a Markdown table."""
    return records.markdown_table(("claim", "here", "holds"), findings)


def _parts(name: str, seeds: int, configs: Path, data_dir: Path | None) -> Parts:
    study = STUDIES[name]
    if study.dataset is None:
        return study.parts(seeds)
    if data_dir is None:
        raise ConfigError(
            f"`data_dir` must be given for the study {name}, which trains on {study.dataset}. Pass "
            "--data-dir, the directory with its published files."
        )
    return study.parts(seeds, configs, data_dir)


def _rows(name: str, parts: Parts, path: Path, seeds: int, bar: Bar) -> list[Row]:
    """Returns the rows of a study; reads the parts that the same code has computed."""
    made_by = json.dumps(
        {"study": name, "seeds": seeds, "code": source_sha256()[:16], **records.versions()}
    )
    whole, begun = _read(path, made_by), path.with_name(path.name + ".part")
    if whole is not None:
        bar.update(len(parts))
        return whole
    rows = _read(begun, made_by) or []
    done = max((int(row["part"]) for row in rows), default=-1) + 1
    bar.update(done)
    for index in range(done, len(parts)):
        rows += [{"part": index, **row} for row in parts[index]()]
        _write(begun, made_by, rows)
        bar.update()
    begun.replace(path)
    # Read the rows back, so that a figure does not depend on whether its numbers are fresh.
    return _read(path, made_by) or []


def _read(path: Path, made_by: str) -> list[Row] | None:
    """Returns the rows of a file, or None if its first line differs from `made_by`."""
    if not path.is_file():
        return None
    with open(path, encoding="utf-8", newline="") as file:
        if file.readline().removeprefix("# ").rstrip("\n") != made_by:
            return None
        rows = csv.DictReader(file)
        return [{name: _number(value) for name, value in row.items()} for row in rows]


def _write(path: Path, made_by: str, rows: list[Row]) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", newline="") as file:
        file.write(f"# {made_by}\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
