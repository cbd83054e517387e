"""Runs studies by name: numbers, and the finding for each claim."""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dpoptax.training.bars import Bar
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import files
from experiments.studies import (
    filters,
    geodp_errors,
    geodp_mnist,
    kalman_gain,
    noisy_regression,
    release_cosines,
)
from experiments.studies.rows import Findings, Row


class Study(NamedTuple):
    """A study of one figure.

    Attributes:
        title: Its heading.
        source: Paper and figure, or a note that no paper has it.
        rows: Computes the numbers for a number of seeds. A study that trains also takes the folder
            of data.
        findings: Compares the claims with the rows. Each finding is the claim in our words, the
            numbers computed here, and whether it holds: "yes", "no" or "in part".
        dataset: Name of the published data that the study trains on, if any.
    """

    title: str
    source: str
    rows: Callable[..., list[Row]]
    findings: Callable[[list[Row]], Findings]
    dataset: str | None = None


def _for_each_seed(rows: Callable[[int], list[Row]], seeds: int) -> list[Row]:
    return [row for seed in range(seeds) for row in rows(seed)]


def _figure(figure: Callable[..., list[Row]]) -> Callable[[int], list[Row]]:
    return functools.partial(_for_each_seed, functools.partial(geodp_errors.rows, figure))


STUDIES: dict[str, Study] = {
    "filters": Study(
        "Time and frequency response of the filters",
        "DOPPLER, Fig. 6",
        lambda seeds: filters.rows(),
        filters.findings,
    ),
    "geodp-noise": Study(
        "Errors of GeoDP as published, against σ, d and B",
        "GeoDP, Fig. 3",
        _figure(geodp_errors.figure_3),
        geodp_errors.figure_3_findings,
    ),
    "geodp-beta": Study(
        "Errors of GeoDP as published, against β",
        "GeoDP, Fig. 4",
        _figure(geodp_errors.figure_4),
        geodp_errors.figure_4_findings,
    ),
    "kalman-gain": Study(
        "Gain and error variance of DiSK's filter converge",
        "DiSK, Fig. 3",
        kalman_gain.rows,
        kalman_gain.findings,
    ),
    "noisy-regression": Study(
        "Linear regression with noisy gradients",
        "DiSK, Fig. 6(a)",
        noisy_regression.rows,
        noisy_regression.findings,
    ),
    "release-cosines": Study(
        "Direction of a release, per clip geometry, at equal privacy",
        "in no paper; GeoDP's claim for its proven counterpart",
        functools.partial(_for_each_seed, release_cosines.rows),
        release_cosines.findings,
    ),
    "geodp-mnist": Study(
        "Logistic regression on MNIST",
        "GeoDP, Fig. 5",
        geodp_mnist.rows,
        geodp_mnist.findings,
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
    data_dir: Path | None = None,
    progress: bool = True,
) -> dict[str, Findings]:
    """Computes studies, and returns their findings by name.

    Writes NAME.jsonl with all numbers and NAME.md for each study.

    Raises:
        ConfigError: The name is unknown, `seeds` is below 1, or a study that trains has no data.
    """
    for name in names:
        if name not in STUDIES:
            raise unknown_name("study", name, STUDIES)
        if STUDIES[name].dataset is not None and data_dir is None:
            raise ConfigError(
                f"`data_dir` must be given for the study {name}, which trains on "
                f"{STUDIES[name].dataset}. Pass --data-dir, the directory with its published files."
            )
    files.check_count("seeds", seeds)
    workdir.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in Bar(names, unit="study", disable=not progress):
        study = STUDIES[name]
        rows = study.rows(seeds) if study.dataset is None else study.rows(seeds, data_dir)
        found[name] = study.findings(rows)
        lines = (json.dumps(files.plain(row), ensure_ascii=False) + "\n" for row in rows)
        (workdir / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        text = f"# {study.title}\n\n{study.source}.\n\n{findings_table(found[name])}\n"
        (workdir / f"{name}.md").write_text(text, encoding="utf-8")
    return found


def findings_table(findings: Findings) -> str:
    """Returns the findings as a Markdown table."""
    return files.markdown_table(("claim", "here", "holds"), findings)
