"""Where a command's wall time goes, from its start to the first step and from there to the end.

`python -m benchmarks startup CONFIG...`: each is trained twice by `dpoptax train` in a process of
its own, first with nothing kept of what was compiled before, then with what the first time left.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.timing import ROOT
from dpoptax.training.run.records import markdown_table

PHASES = (
    "import",
    "data",
    "accounting",
    "init",
    "compile",
    "steps",
    "evaluation",
    "checkpoints",
    "telemetry",
    "files",
    "other",
)

_CHILD = """
import json, sys, time
begun = float(sys.argv[1])
from dpoptax.cli.main import main
imported = time.time()
code = main(sys.argv[3:])
times = {"import": imported - begun, "main": time.time() - imported}
open(sys.argv[2], "w").write(json.dumps(times))
sys.exit(code)
"""


@dataclass
class Startup:
    """Times `dpoptax train` of configs, cold and with a compilation cache."""

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
    """One training.

    Attributes:
        config: Its path, and the start: "first" or "second".
        seconds: Wall time by phase; "other" is the command line and what is in no phase.
        first_step: Seconds from the process's start to the end of the first step.
        whole: Seconds from the process's start to its end.
    """

    config: str
    start: str
    seconds: dict[str, float]
    first_step: float
    whole: float

    @property
    def telemetry(self) -> float:
        """The share of what shows progress, of the wall time."""
        return self.seconds.get("telemetry", 0.0) / self.whole


def measure(config: str, options: list[str], start: str, folder: Path, cache: Path) -> Timed:
    """Trains in a process of its own; `folder` gets the run, `cache` what is compiled."""
    times = folder / "times.json"
    command = [sys.executable, "-c", _CHILD, str(time.time()), str(times), "train", config]
    command += ["--workdir", str(folder / "run"), "--compilation-cache", str(cache), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{config}: {done.stderr.strip().splitlines()[-1]}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    spent = json.loads(times.read_text())
    phases = summary["phases"]
    outside = spent["main"] - sum(phases.values())
    seconds = {"import": spent["import"], **phases, "other": phases.get("other", 0.0) + outside}
    return Timed(
        config,
        start,
        seconds,
        spent["import"] + outside + summary["first_step_seconds"],
        spent["import"] + spent["main"],
    )


def table(results: list[Timed]) -> str:
    """A row for each training: seconds by phase, to the first step, and the telemetry's share."""
    found = {name for result in results for name in result.seconds}
    columns = [*PHASES, *sorted(found - set(PHASES))]
    rows = [
        [
            result.config,
            result.start,
            *(f"{result.seconds.get(name, 0.0):.2f}" for name in columns),
            f"{result.first_step:.2f}",
            f"{result.whole:.2f}",
            f"{100 * result.telemetry:.2f} %",
        ]
        for result in results
    ]
    header = ["config", "start", *columns, "start to first step", "whole", "share of telemetry"]
    return markdown_table(header, rows)


def main(chosen: Startup) -> str:
    """Runs all, and returns the table in seconds; the file holds the same numbers."""
    results = []
    for config in chosen.configs:
        with tempfile.TemporaryDirectory() as base:
            for start in ("first", "second"):
                folder = Path(base) / start
                folder.mkdir()
                options = chosen.options.split()
                results.append(measure(config, options, start, folder, Path(base) / "cache"))
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"config": r.config, "start": r.start, "first_step": r.first_step, "whole": r.whole}
        | {"seconds": r.seconds}
        for r in results
    ]
    chosen.output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return table(results)
