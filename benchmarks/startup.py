"""Times the phases of a command, up to the first step and to the end.

`python -m benchmarks startup CONFIG...` trains each config twice with `dpoptax train` in a separate
process: first with an empty compilation cache, then with the cache of the first run.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.timing import ROOT
from dpoptax.training.run.records import markdown_table

PHASES = (
    "import",
    "devices",
    "data",
    "accounting",
    "init",
    "compile",
    "steps",
    "evaluation",
    "generation",
    "checkpoints",
    "telemetry",
    "files",
    "other",
)

_CHILD = """
import json, sys, time
begun = float(sys.argv[1])
from dpoptax.training.cli.main import main
import dpoptax.training.cli.commands, dpoptax.training.loop
from benchmarks.phase_times import PhaseTimes, install
install()
imported = time.time()
code = main(sys.argv[3:])
times = {"import": imported - begun, "main": time.time() - imported}
times["processor"] = time.process_time()
if PhaseTimes.newest is not None:
    for name in ("first_step", "first_processor"):
        times[name] = getattr(PhaseTimes.newest, name)
    times["phases"] = PhaseTimes.newest.seconds()
open(sys.argv[2], "w").write(json.dumps(times))
sys.exit(code)
"""


@dataclass
class Startup:
    """Times `dpoptax train` with an empty and with a full compilation cache."""

    configs: tyro.conf.Positional[tuple[str, ...]] = (
        "configs/digits/dp_sgd.py",
        "configs/digits/disk.py",
        "configs/digits/hyperspherical.py",
    )
    """Python files with get_config()."""
    options: str = ""
    """Options for each training, such as "--model cnn --accountant rdp"."""
    output: Path = ROOT / "benchmarks" / "results" / "startup.json"


@dataclass(frozen=True)
class Timed:
    """Times of one training.

    Attributes:
        config: Path of the config, and the start: "first" or "second".
        seconds: Wall time by phase; "other" is the command line and everything outside phases.
        first_step: Seconds from the start of the process to the end of the first step.
        first_processor: Processor seconds of all threads up to the end of the first step.
        whole: Seconds from the start of the process to its end.
        processor: Processor seconds of all threads up to the end of the command.
    """

    config: str
    start: str
    seconds: dict[str, float]
    first_step: float
    first_processor: float
    whole: float
    processor: float

    @property
    def shown(self) -> float:
        """Returns the seconds spent on showing progress."""
        return self.seconds.get("telemetry", 0.0)

    @property
    def telemetry(self) -> float:
        """Returns the share of time spent on showing progress.

        This is the smaller of the shares of wall time and processor time. Threads increase the
        processor time, and a busy machine increases the wall time.
        """
        return self.shown / min(self.whole, self.processor)


def measure(config: str, options: list[str], start: str, folder: Path, cache: Path) -> Timed:
    """Trains in a separate process that writes to `folder` and to the cache `cache`."""
    times, begun = folder / "times.json", time.time()
    command = [sys.executable, "-c", _CHILD, str(begun), str(times), "train", config]
    command += ["--workdir", str(folder / "run"), *options]
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    whole = time.time() - begun
    if done.returncode:
        said = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        raise RuntimeError(f"{config}: {said[-1]}")
    return timed(config, start, json.loads(times.read_text()), whole)


def timed(config: str, start: str, spent: dict[str, Any], whole: float) -> Timed:
    """Returns the times of one training.

    `spent` holds the times of the command, and those of the run by phase. The run's times start
    after the command has read its config, and end before the process does.
    """
    phases = spent["phases"]
    before = spent["import"] + spent["main"] - sum(phases.values())
    seconds = {"import": spent["import"], **phases}
    seconds["other"] = whole - sum(seconds.values()) + phases.get("other", 0.0)
    return Timed(
        config,
        start,
        seconds,
        before + spent["first_step"],
        spent["first_processor"],
        whole,
        spent["processor"],
    )


def table(results: list[Timed]) -> str:
    """Returns a table with a row per training: seconds by phase and telemetry's share."""
    found = {name for result in results for name in result.seconds}
    columns = [*PHASES, *sorted(found - set(PHASES))]
    rows = [
        [
            result.config,
            result.start,
            *(f"{result.seconds.get(name, 0.0):.2f}" for name in columns),
            f"{result.first_step:.2f}",
            f"{result.first_processor:.2f}",
            f"{result.whole:.2f}",
            f"{result.processor:.2f}",
            f"{100 * result.telemetry:.2f} %",
        ]
        for result in results
    ]
    header = ["config", "start", *columns, "start to first step", "its processor"]
    header += ["whole", "processor", "share of telemetry"]
    return markdown_table(header, rows)


def main(chosen: Startup) -> str:
    """Runs all trainings and returns the table in seconds; a file keeps the numbers."""
    results = []
    for config in chosen.configs:
        with tempfile.TemporaryDirectory() as base:
            for start in ("first", "second"):
                folder = Path(base) / start
                folder.mkdir()
                options = chosen.options.split()
                results.append(measure(config, options, start, folder, Path(base) / "cache"))
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(result) for result in results]
    chosen.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return table(results)
