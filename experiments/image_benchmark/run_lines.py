"""Stores comparisons as lines of JSON, one per run, small enough for a repository."""

import dataclasses
import json
import math
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dpoptax.training import ConfigError
from dpoptax.training.run import records
from experiments.config import ExperimentConfig

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


_TYPES = {
    name: dict if typing.get_origin(kind) is dict else kind
    for name, kind in typing.get_type_hints(Line).items()
}
"""Types of the attributes of a line, for `isinstance`."""


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
    path.parent.mkdir(parents=True, exist_ok=True)
    known = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
    with open(path, "a", encoding="utf-8") as file:
        for text in dict.fromkeys(records.to_json(line) for line in lines):
            if text not in known:
                file.write(text + "\n")


def read(path: Path) -> list[Line]:
    """Reads the lines of a file.

    Raises:
        ConfigError: A line is not a record. The message gives its number.
    """
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(text)
            if not (isinstance(values, dict) and values.keys() == _TYPES.keys()):
                raise ValueError(f"its fields are not {', '.join(_TYPES)}")
            wrong = [n for n, kind in _TYPES.items() if not isinstance(values[n], kind)]
            if wrong:
                raise ValueError(f"{', '.join(wrong)} have another type")
            stated, spent = values["epsilon"], values["spent"]
            priced = stated is not None and not values["unproven"] and values["split"] == "test"
            if priced and not (spent or math.inf) <= stated:
                raise ValueError(f"it has spent ε = {spent}, but it is listed at ε = {stated}")
        except ValueError as error:
            raise ConfigError(
                f"Line {number} of {path} is not a record of a run: {error}. Remove the line, or "
                "write the file again with python -m experiments record."
            ) from error
        found.append(Line(**values))
    return found
