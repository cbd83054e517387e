"""Implements the command line of the experiments, `python -m experiments COMMAND`."""

import dataclasses
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from dpoptax.training import load_config
from dpoptax.training.cli.main import run_command
from dpoptax.training.errors import ConfigError, unknown_name

_PROGRAM = "python -m experiments"
_USAGE = f"""\
usage: {_PROGRAM} COMMAND ...

Experiments that recompute the papers' results. Run them from the root of the
repository. `{_PROGRAM} COMMAND --help` lists the options.

commands, described in experiments/README.md:"""


@dataclasses.dataclass(frozen=True)
class StudyArguments:
    """Computes numbers and findings for each study of the papers' claims.

    Attributes:
        names: Names of studies, listed in experiments/README.md. Without names, all that need no
            data.
        workdir: Folder for a .jsonl and a .md file of each study.
        seeds: Number of repetitions.
        data_dir: Folder with published data. Studies that train on such data need it.
        configs: The repository's folder of configs, for the studies that train.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    workdir: Path = Path("runs/studies")
    seeds: int = 5
    data_dir: Path | None = None
    configs: Path = Path("configs")


@dataclasses.dataclass(frozen=True)
class FetchArguments:
    """Downloads published data sets and checks their checksums.

    Attributes:
        names: Names of data sets.
        data_dir: Folder for the files. A missing folder is created.
    """

    names: tyro.conf.Positional[tuple[str, ...]]
    data_dir: Path


@dataclasses.dataclass(frozen=True)
class SpectrumArguments:
    """Trains a config, records its releases, and draws the spectra.

    Attributes:
        config: A config file, or FILE:NAME.
        output: Folder for recording.npz and spectrum.png.
        coordinates: Number of recorded coordinates of each gradient.
        data_dir: Folder with the files of the data set, if the config names none.
    """

    config: tyro.conf.Positional[str]
    output: Path
    coordinates: int = 1000
    data_dir: Path | None = None


@dataclasses.dataclass(frozen=True)
class RecordArguments:
    """Adds the runs of a comparison to a file of records.

    Attributes:
        workdir: Directory of a comparison, with its results.json.
        output: File of JSON lines that the runs are added to.
    """

    workdir: tyro.conf.Positional[Path]
    output: Path


@dataclasses.dataclass(frozen=True)
class DigitsArguments:
    """Trains settings of private training on digits and writes a table.

    Attributes:
        name: The measurement: batch sizes at equal compute, or uses of public examples.
        output: The Markdown file.
        trials: Number of settings tried for each row.
        seeds: Number of runs with the best setting.
    """

    name: tyro.conf.Positional[Literal["batches", "public"]]
    output: Path
    trials: int = 16
    seeds: int = 10


@dataclasses.dataclass(frozen=True)
class ImageBenchmarkArguments:
    """Writes the page on methods on images from the records of comparisons.

    Attributes:
        folder: Folder with the files that `record` writes. The figures are also written there.
        output: The Markdown file. By default it is next to the folder and has its name.
    """

    folder: tyro.conf.Positional[Path]
    output: Path | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs an experiment; returns the exit code, which is 2 for errors of the user."""
    return run_command(_PROGRAM, _dispatch, arguments)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n  ".join([_USAGE, *COMMANDS]))
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    place, options, run = COMMANDS[command].split()
    module = importlib.import_module(place)
    kind = getattr(module, options)
    purpose = (kind.__doc__ or "").partition("\n")[0]
    given = tyro.cli(kind, args=rest, prog=f"{_PROGRAM} {command}", description=purpose)
    print(getattr(module, run)(given))
    return 0


def study(given: StudyArguments) -> str:
    """Runs studies and returns their findings."""
    from experiments.studies import catalog

    names = given.names or catalog.names_for(given.data_dir)
    found = catalog.run_studies(
        names,
        given.workdir,
        seeds=given.seeds,
        configs=given.configs,
        data_dir=given.data_dir,
    )
    texts = [
        f"\n{catalog.STUDIES[name].title} ({catalog.STUDIES[name].source})\n"
        + catalog.findings_table(findings)
        for name, findings in found.items()
    ]
    return "\n".join([*texts, f"\nWritten to {given.workdir}: NAME.jsonl and NAME.md"])


def fetch(given: FetchArguments) -> str:
    """Downloads data sets and returns their new files."""
    from experiments.data import fetching

    found = {name: fetching.fetch(name, given.data_dir) for name in given.names}
    return "\n".join(
        f"{name}: {', '.join(map(str, files)) or 'all files are there'}"
        for name, files in found.items()
    )


def spectrum(given: SpectrumArguments) -> str:
    """Trains a config and writes its recording."""
    from experiments.config import settings_of
    from experiments.recording import record_run

    config = load_config(given.config)
    if given.data_dir is not None:
        config = config.replace(data_dir=given.data_dir)
    record_run(settings_of(config), given.coordinates, progress=True).write(given.output)
    return f"Written to {given.output}: recording.npz, spectrum.png"


def record(given: RecordArguments) -> str:
    """Adds the runs of a comparison to a file."""
    from experiments.image_benchmark.run_lines import append, comparison_lines

    path = given.workdir / "results.json"
    if not path.is_file():
        raise ConfigError(
            f"`workdir` must contain results.json, got {str(given.workdir)!r}. Pass the --workdir "
            "of a `dpoptax compare`."
        )
    append(given.output, comparison_lines(json.loads(path.read_text(encoding="utf-8"))))
    return f"Written to {given.output}"


def digits(given: DigitsArguments) -> str:
    """Measures on digits and writes the page."""
    from experiments.digits import batches, public

    page = batches.batches_page if given.name == "batches" else public.public_page
    given.output.write_text(page(trials=given.trials, seeds=given.seeds), encoding="utf-8")
    return f"Written to {given.output}"


def image_benchmark(given: ImageBenchmarkArguments) -> str:
    """Writes the page on methods on images."""
    from experiments.image_benchmark.page import write_page

    return f"Written to {write_page(given.folder, given.output)}"


COMMANDS = {
    "study": f"{__name__} StudyArguments study",
    "fetch": f"{__name__} FetchArguments fetch",
    "spectrum": f"{__name__} SpectrumArguments spectrum",
    "record": f"{__name__} RecordArguments record",
    "released-code": "experiments.released.report ReleasedCode write_report",
    "digits": f"{__name__} DigitsArguments digits",
    "rare-class": "experiments.rare_class RareClassArguments rare_class_page",
    "images": "experiments.transfer.image_recipe ImagesArguments run_images",
    "language": "experiments.gemma.fine_tuning LanguageArguments run",
    "number-of-trials": "experiments.reports.number_of_trials NumberOfTrialsArguments table",
    "savings": "experiments.reports.savings SavingsArguments table",
    "text": "experiments.text.recipe TextArguments run",
    "several-records": "experiments.reports.several_records SeveralRecordsArguments table",
    "image-benchmark": f"{__name__} ImageBenchmarkArguments image_benchmark",
}
"""The module of each command, the class of its options, and the function that returns its text."""
