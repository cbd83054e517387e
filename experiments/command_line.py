"""The command line: `python -m experiments study`, `report` and `image-benchmark`."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro

from dpoptax.cli.main import CACHE_OPTIONS, run_command
from dpoptax.training.errors import unknown_name
from experiments.claims.study_names import NAMES

_PROGRAM = "python -m experiments"
_USAGE = f"""\
usage: {_PROGRAM} COMMAND ...

Experiments that recompute the papers' results. Run them from the root of the
repository.

commands:
  study [NAME...] [--workdir DIR] [--seeds N] [--data-dir DIR]
        numbers, a figure and findings for each study; without a NAME, all
        studies that need no data
  report [--workdir DIR] [--output FILE]
        everything that runs on any machine, against what the papers say, and
        the cost of the rest
  image-benchmark FOLDER [--output FILE]
        the page on methods on images, from the records in FOLDER

{CACHE_OPTIONS}

`{_PROGRAM} COMMAND --help` lists all options."""


@dataclasses.dataclass(frozen=True)
class StudyArguments:
    """Options of `study`.

    Attributes:
        names: Names of studies. Without names, all studies that need no data.
        workdir: Folder for a .csv, a .png and a .md file of each study.
        seeds: Number of repetitions. The figures show their mean and range.
        data_dir: Folder with published data. Studies that train on such data need it.
        configs: The repository's folder of configs, for the studies that train.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    workdir: Path = Path("runs/studies")
    seeds: int = 5
    data_dir: Path | None = None
    configs: Path = Path("configs")


@dataclasses.dataclass(frozen=True)
class ImageBenchmarkArguments:
    """Options of `image-benchmark`.

    Attributes:
        folder: Folder with the records of `dpoptax compare --records`. The figures go there.
        output: The Markdown file. By default it lies next to the folder and has its name.
    """

    folder: tyro.conf.Positional[Path]
    output: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs an experiment; returns the exit code, 2 for anything that the user can mend."""
    return run_command(_PROGRAM, _dispatch, arguments)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    return COMMANDS[command](rest)


# Each command imports the modules that it runs, so that help does not wait for them.


def _study(arguments: list[str]) -> int:
    given = tyro.cli(
        StudyArguments,
        args=arguments,
        prog=f"{_PROGRAM} study",
        description=f"Run studies of the papers' claims: {', '.join(NAMES)}.",
    )
    from experiments.claims import catalog

    names = given.names or catalog.names_for(given.data_dir)
    found = catalog.run_studies(
        names,
        given.workdir,
        seeds=given.seeds,
        configs=given.configs,
        data_dir=given.data_dir,
    )
    for name, findings in found.items():
        print(f"\n{catalog.STUDIES[name].title} ({catalog.STUDIES[name].source})")
        print(catalog.findings_table(findings))
    print(f"\nWritten to {given.workdir}: NAME.csv, NAME.png and NAME.md")
    return 0


def _report(arguments: list[str]) -> int:
    from experiments.reports.reproduction import Report, write_report

    given = tyro.cli(
        Report,
        args=arguments,
        prog=f"{_PROGRAM} report",
        description="Run the parts of the papers' experiments that run anywhere; write a report.",
    )
    print(f"Written to {write_report(given)}")
    return 0


def _image_benchmark(arguments: list[str]) -> int:
    from experiments.image_benchmark.page import write_page

    given = tyro.cli(
        ImageBenchmarkArguments,
        args=arguments,
        prog=f"{_PROGRAM} image-benchmark",
        description="Write the page on methods on images from the records of comparisons.",
    )
    print(f"Written to {write_page(given.folder, given.output)}")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "study": _study,
    "report": _report,
    "image-benchmark": _image_benchmark,
}
"""The commands by name. Each takes the remaining arguments and returns the exit code."""
