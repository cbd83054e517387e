"""Stores comparisons as lines of JSON, one per run, small enough for a repository."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpoptax.training import ConfigError
from dpoptax.training.run import files
from experiments.config import ExperimentConfig
from experiments.run_once import append_lines, read_lines

_APART = {"learning_rate", "seed", "epsilon", "delta", "data_dir"}
_IDLE = {"checkpoint_every", "keep_checkpoints", "eval_every", "microbatch_size"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One run.

    Attributes:
        name: Name of the config.
        method: Name of the method.
        settings: Fields of the config that differ from the defaults. Attributes of the line, and
            fields that do not change the parameters, are left out.
        epsilon: Target of the comparison. None for a run without privacy.
        spent: ε of one run on the test split. None for trials, and if no ε is stated.
        unproven: Whether the method has no proof, and therefore no ε.
        delta: δ of `epsilon` and `spent`, or None.
        learning_rate: The learning rate.
        seed: The seed.
        split: "held-out" for a trial that selects a learning rate, "test" for a reported run.
        accuracy: Accuracy on that split, in [0, 1].
        seconds: Seconds of its training. None for trials.
        versions: Versions of the packages.
        code: First characters of the SHA-256 of the package's source.
    """

    name: str
    method: str
    settings: dict[str, Any]
    epsilon: float | int | None
    spent: float | None
    unproven: bool
    delta: float | None
    learning_rate: float | int
    seed: int
    split: str
    accuracy: float
    seconds: float | None
    versions: dict[str, str]
    code: str


def comparison_lines(results: Mapping[str, Any]) -> list[Line]:
    """Returns the lines of all runs in the results.json of a comparison."""
    found = []
    for method in results["methods"]:
        runs = method["runs"]
        common = _common(method["config"], results, runs[0])
        for point in method["grid"]:
            accuracies = point["validation_scores"]
            for seed, accuracy in zip(results["seeds"], accuracies, strict=False):
                found.append(
                    Line(
                        **common,
                        spent=None,
                        learning_rate=point["learning_rate"],
                        seed=seed,
                        split="held-out",
                        accuracy=accuracy,
                        seconds=None,
                    )
                )
        found += [
            Line(
                **common,
                spent=run["epsilon"],
                learning_rate=run["config"]["learning_rate"],
                seed=run["config"]["seed"],
                split="test",
                accuracy=run["test_accuracy"],
                seconds=run["train_seconds"],
            )
            for run in runs
        ]
    return found


def _common(name: str, results: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes that all runs of a config share, from the summary of one."""
    config, defaults = run["config"], ExperimentConfig().to_dict()
    settings = {
        field: value
        for field, value in config.items()
        if field not in _APART | _IDLE and (value != defaults[field] or field == "method")
    }
    if run["unproven"]:  # its noise is that of DP-SGD at this ε
        settings.pop("noise_multiplier", None)
    return {
        "name": name,
        "method": run["method"],
        "settings": settings,
        "epsilon": results["epsilon"] if run["private"] or run["unproven"] else None,
        "unproven": run["unproven"] is not None,
        "delta": run["delta"],
        "versions": results["versions"],
        "code": results["code"][:12],
    }


def append(path: Path, lines: Iterable[Line]) -> None:
    """Appends the lines that the file does not have yet."""
    known = read_lines(path)
    for line in map(files.plain, lines):
        if line not in known:
            known.append(line)
            append_lines(path, [line])


def read(path: Path) -> list[Line]:
    """Reads the lines of a file.

    Raises:
        ConfigError: A run has spent more than the ε at which it is listed.
    """
    found = [Line(**line) for line in read_lines(path)]
    for number, line in enumerate(found, 1):
        stated = None if line.unproven or line.split != "test" else line.epsilon
        if stated is not None and not (line.spent or math.inf) <= stated:
            raise ConfigError(
                f"Line {number} of {path} has spent ε = {line.spent}, but it is listed at ε = "
                f"{line.epsilon}. Remove it, or write the file again with python -m experiments "
                "record."
            )
    return found
