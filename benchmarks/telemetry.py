"""Times the progress reports of training, for one config of each kind.

`python -m benchmarks telemetry`. A kind is a method, a sampling scheme, an accountant and a unit of
privacy. Every run starts with an empty cache, so that everything it shows is compiled and computed.
Configs that read data from files are trained on the digits instead, with the evaluation interval of
the digit configs. These runs are the shortest, so telemetry takes its largest share of them.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from benchmarks.startup import Timed, measure
from benchmarks.timing import ROOT
from dpoptax.training import TrainConfig, load_configs
from dpoptax.training.run.records import markdown_table
from experiments.config import ExperimentConfig

# Replaces these fields of configs that read files.
ON_DIGITS = {
    "dataset": "digits",
    "data_dir": None,
    "model": "mlp",
    "pretrained": None,
    "lora_rank": None,
    "features": "none",
    "batch_size": 128,
    "microbatch_size": None,
    "steps": 120,
    "eval_every": 10,
    "checkpoint_every": 100,
}

_CONFIG = """
import dataclasses
from dpoptax.training import load_configs

def get_config():
    config = load_configs({path!r})[{name!r}]
    changes = {changes!r}
    if changes and config.noise_multiplier is not None:
        changes["epsilon"] = None
    return dataclasses.replace(config, **changes)
"""


@dataclass
class Telemetry:
    """Times the first start of `dpoptax train` for each kind of config."""

    configs: Path = ROOT / "configs"
    """Folder of Python files with get_config() or get_configs()."""
    output: Path = ROOT / "benchmarks" / "results" / "telemetry.json"


class Kind(NamedTuple):
    """Properties of a config that the cost of telemetry may depend on.

    Attributes:
        method: Name of the method.
        sampling: Name of the sampling scheme.
        accountant: "pld" or "rdp".
        unit: Unit of privacy, "example" or "user".
    """

    method: str
    sampling: str
    accountant: str
    unit: str


class Chosen(NamedTuple):
    """A config that represents its kind.

    Attributes:
        path: File of the config.
        name: Name of the config in the file.
        read: Whether the config reads data from files.
    """

    path: Path
    name: str
    read: bool


def kinds(folder: Path) -> dict[Kind, Chosen]:
    """Returns one config of each kind in a folder, preferably one that reads no files."""
    found: dict[Kind, Chosen] = {}
    for path, name, config in _configs(folder):
        if config.noise_multiplier is None and config.method.unproven() is not None:
            continue  # trained at the noise multiplier of another config
        kind = Kind(config.method.name, config.sampling, config.accountant, config.unit)
        read = isinstance(config, ExperimentConfig)
        if kind not in found or (found[kind].read and not read):
            found[kind] = Chosen(path, name, read)
    return dict(sorted(found.items()))


def _configs(folder: Path) -> Iterator[tuple[Path, str, TrainConfig]]:
    for path in sorted(folder.rglob("*.py")):
        for name, config in load_configs(path).items():
            yield path, name, config


def config_file(chosen: Chosen) -> str:
    """Returns the source of a config file for the chosen config."""
    changes = ON_DIGITS if chosen.read else {}
    return _CONFIG.format(path=str(chosen.path), name=chosen.name, changes=changes)


def table(results: list[tuple[Kind, Chosen, Timed]]) -> str:
    """Returns a table of total time, telemetry time and its share per training."""
    rows = [
        [
            kind.method,
            kind.sampling,
            kind.accountant,
            kind.unit,
            f"{chosen.path.stem}{' on digits' if chosen.read else ''}",
            f"{timed.whole:.2f}",
            f"{timed.processor:.2f}",
            f"{timed.shown:.3f}",
            f"{100 * timed.telemetry:.2f} %",
        ]
        for kind, chosen, timed in results
    ]
    header = [*Kind._fields, "config", "whole", "processor", "telemetry", "share"]
    return markdown_table(header, rows)


def main(given: Telemetry) -> str:
    """Runs all trainings and returns the table in seconds; a file keeps the numbers."""
    results = []
    with tempfile.TemporaryDirectory() as base:
        for number, (kind, chosen) in enumerate(tqdm(kinds(given.configs).items(), unit="kind")):
            place = Path(base) / str(number)
            place.mkdir()
            (place / "config.py").write_text(config_file(chosen), encoding="utf-8")
            timed = measure(str(place / "config.py"), [], "first", place, place / "cache")
            results.append((kind, chosen, timed))
    given.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**kind._asdict(), **dataclasses.asdict(timed)} for kind, _, timed in results]
    given.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return table(results)
