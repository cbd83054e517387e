"""Implements the command line of the experiments, `python -m experiments COMMAND`.

A command is a function: its arguments are the flags, and it returns the text to print.
"""

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
    place, name = COMMANDS[command].split(":")
    function = getattr(importlib.import_module(place), name)
    purpose = (function.__doc__ or "").partition("\n")[0]
    print(tyro.cli(function, args=rest, prog=f"{_PROGRAM} {command}", description=purpose))
    return 0


def study(
    names: tyro.conf.Positional[tuple[str, ...]] = (),
    *,
    workdir: Path = Path("runs/studies"),
    seeds: int = 5,
    data_dir: Path | None = None,
) -> str:
    """Computes numbers and findings for each study of the papers' claims.

    Args:
        names: Names of studies, listed in experiments/README.md. Without names, all that need no
            data.
        workdir: Folder for a .jsonl and a .md file of each study.
        seeds: Number of repetitions.
        data_dir: Folder with published data. Studies that train on such data need it.
    """
    from experiments.studies import catalog

    chosen = names or catalog.names_for(data_dir)
    found = catalog.run_studies(chosen, workdir, seeds=seeds, data_dir=data_dir)
    texts = [
        f"\n{catalog.STUDIES[name].title} ({catalog.STUDIES[name].source})\n"
        + catalog.findings_table(findings)
        for name, findings in found.items()
    ]
    return "\n".join([*texts, f"\nWritten to {workdir}: NAME.jsonl and NAME.md"])


def fetch(names: tyro.conf.Positional[tuple[str, ...]], *, data_dir: Path) -> str:
    """Downloads published data sets and checks their checksums.

    Args:
        names: Names of data sets.
        data_dir: Folder for the files. A missing folder is created.
    """
    from experiments.data import fetching

    found = {name: fetching.fetch(name, data_dir) for name in names}
    return "\n".join(
        f"{name}: {', '.join(map(str, files)) or 'all files are there'}"
        for name, files in found.items()
    )


def spectrum(
    config: tyro.conf.Positional[str],
    *,
    output: Path,
    coordinates: int = 1000,
    data_dir: Path | None = None,
) -> str:
    """Trains a config, records its releases, and draws the spectra.

    Args:
        config: A config file, or FILE:NAME.
        output: Folder for recording.npz and spectrum.png.
        coordinates: Number of recorded coordinates of each gradient.
        data_dir: Folder with the files of the data set, if the config names none.
    """
    from experiments.config import settings_of
    from experiments.recording import record_run

    loaded = load_config(config)
    if data_dir is not None:
        loaded = loaded.replace(data_dir=data_dir)
    record_run(settings_of(loaded), coordinates, progress=True).write(output)
    return f"Written to {output}: recording.npz, spectrum.png"


def record(workdir: tyro.conf.Positional[Path], *, output: Path) -> str:
    """Adds the runs of a comparison to a file of records.

    Args:
        workdir: Directory of a comparison, with its results.json.
        output: File of JSON lines that the runs are added to.
    """
    from experiments.image_benchmark.run_lines import append, comparison_lines

    path = workdir / "results.json"
    if not path.is_file():
        raise ConfigError(
            f"`workdir` must contain results.json, got {str(workdir)!r}. Pass the --workdir of a "
            "`dpoptax compare`."
        )
    append(output, comparison_lines(json.loads(path.read_text(encoding="utf-8"))))
    return f"Written to {output}"


def digits(
    name: tyro.conf.Positional[Literal["batches", "public"]],
    *,
    output: Path,
    trials: int = 16,
    seeds: int = 10,
) -> str:
    """Trains settings of private training on digits and writes a table.

    Args:
        name: The measurement: batch sizes at equal compute, or uses of public examples.
        output: The Markdown file.
        trials: Number of settings tried for each row.
        seeds: Number of runs with the best setting.
    """
    from experiments.digits import batches, public

    page = batches.batches_page if name == "batches" else public.public_page
    output.write_text(page(trials=trials, seeds=seeds), encoding="utf-8")
    return f"Written to {output}"


COMMANDS = {
    "study": f"{__name__}:study",
    "fetch": f"{__name__}:fetch",
    "spectrum": f"{__name__}:spectrum",
    "record": f"{__name__}:record",
    "released-code": "experiments.released.report:write_report",
    "digits": f"{__name__}:digits",
    "rare-class": "experiments.rare_class:rare_class_page",
    "tabular": "experiments.tabular:tabular_page",
    "images": "experiments.transfer.image_recipe:run_images",
    "language": "experiments.gemma.fine_tuning:run",
    "number-of-trials": "experiments.reports.number_of_trials:table",
    "savings": "experiments.reports.savings:table",
    "public-texts": "experiments.text.public_texts:run",
    "sampled-texts": "experiments.gemma.sampled_texts:run",
    "text": "experiments.text.recipe:run",
    "several-records": "experiments.reports.several_records:table",
    "image-benchmark": "experiments.image_benchmark.page:write_page",
}
"""The function of each command."""
