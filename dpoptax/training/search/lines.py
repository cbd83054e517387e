"""The runs of comparisons as lines of JSON: small enough for a repository, a line a run."""

import dataclasses
import json
import math
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpoptax.training.config import TrainConfig
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import records
from dpoptax.training.search.results import Record

_APART = {"learning_rate", "seed", "epsilon", "delta", "data_dir", "record_training_metrics"}
_IDLE = {"checkpoint_every", "keep_checkpoints", "eval_every", "microbatch_size"}


@dataclasses.dataclass(frozen=True)
class Line:
    """One run.

    Attributes:
        name: Of the config.
        method: The method's name.
        settings: Fields of the config that are not the defaults, but for those that stand here by
            themselves or change no parameter.
        epsilon: What was asked for; None for a run without privacy.
        spent: What one such run spends; None where no ε is stated.
        unproven: Whether that is for want of a proof.
        delta: δ of both; None where there is none.
        learning_rate: The rate.
        seed: The seed.
        split: "held-out", of a trial that selects a rate; "test", of a run that is reported.
        accuracy: On that split, in [0, 1].
        seconds: Of its training, beside whatever else the machine did.
        versions: Of the packages.
        code: The first letters of the SHA-256 of the package's source.
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
    seconds: float
    versions: dict[str, str]
    code: str


_TYPES = {
    name: dict if typing.get_origin(kind) is dict else kind
    for name, kind in typing.get_type_hints(Line).items()
}
"""What a line has, for `isinstance`."""


def line(name: str, epsilon: float | None, run: Record, *, held_out: bool) -> Line:
    """The line of a run, whose summary is `run`, at the ε of its comparison."""
    config, defaults = run["config"], TrainConfig().to_dict()
    settings = {
        field: value
        for field, value in config.items()
        if field not in _APART | _IDLE and (value != defaults[field] or field == "method")
    }
    if run["unproven"]:  # its noise follows from this ε, as that of DP-SGD does
        settings.pop("noise_multiplier", None)
    return Line(
        name=name,
        method=run["method"],
        settings=settings,
        epsilon=None if run["noise_multiplier"] is None else epsilon,
        spent=run["epsilon"],
        unproven=run["unproven"] is not None,
        delta=run["delta"],
        learning_rate=config["learning_rate"],
        seed=config["seed"],
        split="held-out" if held_out else "test",
        accuracy=run["test_accuracy"],
        seconds=run["train_seconds"],
        versions=run["versions"],
        code=records.source_sha256()[:12],
    )


def append(path: Path, lines: Iterable[Line]) -> None:
    """Writes the lines that the file does not have yet at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    known = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
    with open(path, "a", encoding="utf-8") as file:
        for text in dict.fromkeys(records.to_json(line) for line in lines):
            if text not in known:
                file.write(text + "\n")


def read(path: Path) -> list[Line]:
    """The lines of a file.

    Raises:
        ConfigError: A line that is none; the message has its number.
    """
    found = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            values = json.loads(text)
            if not (isinstance(values, dict) and values.keys() == _TYPES.keys()):
                raise ValueError(f"its fields are not {', '.join(_TYPES)}")
            wrong = [n for n, kind in _TYPES.items() if not isinstance(values[n], kind)]
            if wrong:
                raise ValueError(f"{', '.join(wrong)}: of another type")
            stated, spent = values["epsilon"], values["spent"]
            if stated is not None and not values["unproven"] and not (spent or math.inf) <= stated:
                raise ValueError(f"it has spent ε = {spent}, and counts as one of {stated}")
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number} is no record of a run: {error}; take it out, or write the "
                "file again with dpoptax compare --records"
            ) from error
        found.append(Line(**values))
    return found
