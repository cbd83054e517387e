"""Runs studies by name: numbers, and the finding for each claim."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dpoptax.training.bars import Bar
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.run import records
from experiments.run_once import record_once
from experiments.studies import (
    filters,
    geodp_errors,
    geodp_mnist,
    kalman_gain,
    noisy_regression,
    release_cosines,
)
from experiments.studies.rows import Findings, Parts, Row


class Study(NamedTuple):
    """A study of one figure.

    Attributes:
        title: Its heading.
        source: Paper and figure, or a note that no paper has it.
        parts: Returns the parts of the work for a number of seeds. Each part is a function that
            returns rows. A study that trains also takes the folders of configs and of data.
        findings: Compares the claims with the rows. Each finding is the claim in our words, the
            numbers computed here, and whether it holds: "yes", "no" or "in part".
        dataset: Name of the published data that the study trains on, if any.
    """

    title: str
    source: str
    parts: Callable[..., Parts]
    findings: Callable[[list[Row]], Findings]
    dataset: str | None = None


def _for_each_seed(rows: Callable[[int], list[Row]], seeds: int) -> Parts:
    return [functools.partial(rows, seed) for seed in range(seeds)]


def _at_once(rows: Callable[[int], list[Row]], seeds: int) -> Parts:
    return [functools.partial(rows, seeds)]


def _figure(figure: Callable[..., list[Row]]) -> Callable[[int], Parts]:
    return functools.partial(_for_each_seed, functools.partial(geodp_errors.rows, figure))


STUDIES: dict[str, Study] = {
    "filters": Study(
        "Time and frequency response of the filters",
        "DOPPLER, Fig. 6",
        lambda seeds: [filters.rows],
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
        functools.partial(_at_once, kalman_gain.rows),
        kalman_gain.findings,
    ),
    "noisy-regression": Study(
        "Linear regression with noisy gradients",
        "DiSK, Fig. 6(a)",
        functools.partial(_at_once, noisy_regression.rows),
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
        geodp_mnist.parts,
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
    configs: Path = Path("configs"),
    data_dir: Path | None = None,
    progress: bool = True,
) -> dict[str, Findings]:
    """Computes studies, and returns their findings by name.

    Writes NAME.jsonl with all numbers and NAME.md for each study. Parts that the same code computed
    before for the same number of seeds are read from the file.

    Raises:
        ConfigError: The name is unknown, `seeds` is below 1, or a study that trains has no data.
    """
    for name in names:
        if name not in STUDIES:
            raise unknown_name("study", name, STUDIES)
    records.check_count("seeds", seeds)
    parts = {name: _parts(name, seeds, configs, data_dir) for name in names}
    found = {}
    with Bar(total=sum(map(len, parts.values())), unit="part", disable=not progress) as bar:
        for name in names:
            bar.set_description(name)
            study, rows = STUDIES[name], []
            for index, part in enumerate(parts[name]):
                rows += _rows(workdir / f"{name}.jsonl", part, study=name, seeds=seeds, part=index)
                bar.update()
            found[name] = study.findings(rows)
            text = f"# {study.title}\n\n{study.source}.\n\n{findings_table(found[name])}\n"
            (workdir / f"{name}.md").write_text(text, encoding="utf-8")
    return found


def findings_table(findings: Findings) -> str:
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


@functools.cache
def source_sha256() -> str:
    """Returns the SHA-256 over the source files of dpoptax and of the experiments."""
    digest = hashlib.sha256(records.source_sha256().encode())
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()


def _rows(path: Path, compute: Callable[[], list[Row]], **fields: Any) -> list[Row]:
    """Returns the rows of a part, from the file if the same code has computed them."""

    def run() -> dict[str, Any]:
        return {
            "rows": [
                {name: x if isinstance(x, str) else float(x) for name, x in row.items()}
                for row in compute()
            ]
        }

    code = {"code": source_sha256()[:16], "versions": records.versions()}
    rows: list[Row] = record_once(path, {**fields, **code}, run)["rows"]
    return rows
