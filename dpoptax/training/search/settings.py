"""Parses settings of config fields from the command line and builds candidates."""

import ast
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dpoptax.training.config import TrainConfig
from dpoptax.training.errors import ConfigError, unknown_name
from dpoptax.training.roles import Role, fields_with


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config with changed fields.

    Attributes:
        name: Name of the original config.
        changes: Changed fields and their values.
        config: The changed config.
    """

    name: str
    changes: dict[str, Any]
    config: TrainConfig


def grid_candidates(configs: dict[str, TrainConfig], given: Sequence[str]) -> list[Candidate]:
    """Returns all combinations of FIELD=VALUE,VALUE,... for every config.

    Raises:
        ConfigError: A field is unknown, or a value is not allowed.
    """
    return _products(configs, [(field, text.split(",")) for field, text in _parsed(given)])


def with_values(configs: dict[str, TrainConfig], given: Sequence[str]) -> dict[str, TrainConfig]:
    """Returns the configs with the values of FIELD=VALUE, which may contain commas.

    Raises:
        ConfigError: A field is unknown, or a value is not allowed.
    """
    values = dict(_parsed(given, "FIELD=VALUE"))
    return {name: _candidate(name, config, values).config for name, config in configs.items()}


def random_candidates(
    configs: dict[str, TrainConfig], given: Sequence[str], count: int, rng: np.random.Generator
) -> list[Candidate]:
    """Draws `count` candidates: a config and a value for each field.

    Raises:
        ConfigError: A field is unknown, or a value is not allowed.
    """
    axes, names = _parsed(given), list(configs)
    drawn = []
    for _ in range(count):
        name = names[int(rng.integers(len(names)))]
        values = {field: _draw(field, text, rng) for field, text in axes}
        drawn.append(_candidate(name, configs[name], values))
    return drawn


def representatives(configs: dict[str, TrainConfig], given: Sequence[str]) -> list[Candidate]:
    """Returns a candidate of each config, whose cost is that of all `random_candidates`.

    Raises:
        ConfigError: A drawn field affects the privacy cost.
    """
    for field, _ in _parsed(given):
        if not all(_is_unpriced(field, config) for config in configs.values()):
            raise ConfigError(
                f"`{field}` must not be drawn for random repetitions, because it changes the "
                "privacy cost of a trial. Pass its values with --grid, or use fixed repetitions."
            )
    rng = np.random.default_rng(0)
    values = {field: _draw(field, text, rng) for field, text in _parsed(given)}
    return [_candidate(name, config, values) for name, config in configs.items()]


def _is_unpriced(field: str, config: TrainConfig) -> bool:
    """Returns whether a field has no effect on the privacy cost."""
    inner = field.removeprefix("method.")
    return inner in fields_with(config if inner == field else config.method, Role.UNPRICED)


def _products(
    configs: dict[str, TrainConfig], axes: list[tuple[str, list[Any]]]
) -> list[Candidate]:
    return [
        _candidate(name, config, dict(zip([field for field, _ in axes], values, strict=True)))
        for name, config in configs.items()
        for values in itertools.product(*(values for _, values in axes))
    ]


def _parsed(given: Sequence[str], form: str = "FIELD=VALUE,VALUE,...") -> list[tuple[str, str]]:
    pairs = []
    for text in given:
        field, separator, values = text.partition("=")
        if not (field and separator and values):
            raise ConfigError(f"A setting must have the form {form}, got {text!r}.")
        pairs.append((field.replace("-", "_"), values))
    names = [field for field, _ in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"Settings must name each field once, got {', '.join(names)}. Pass all values of a "
            "field together."
        )
    return pairs


def _draw(field: str, text: str, rng: np.random.Generator) -> Any:
    """Draws a value from log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH or a list."""
    kind, *ends = text.split(":")
    if not ends:
        choices = text.split(",")
        return choices[int(rng.integers(len(choices)))]
    try:
        low, high = map(float, ends)
    except ValueError:
        low, high = math.nan, math.nan
    if kind not in ("log", "uniform", "int") or not (-math.inf < low < high < math.inf):
        raise ConfigError(
            f"`{field}` must be a range log:LOW:HIGH, uniform:LOW:HIGH or int:LOW:HIGH with LOW "
            f"below HIGH, got {text}."
        )
    if kind == "log":
        if low <= 0:
            raise ConfigError(
                f"`{field}` must be a logarithmic range with LOW above 0, got {text}."
            )
        return _rounded(math.exp(rng.uniform(math.log(low), math.log(high))), low, high)
    if kind == "int":
        return int(rng.integers(int(low), int(high) + 1))
    return _rounded(rng.uniform(low, high), low, high)


def _rounded(value: float, low: float, high: float) -> float:
    """Rounds a drawn value to three digits, or to a hundredth of a narrow range."""
    unit = min(abs(value) / 100, (high - low) / 100)
    decimals = -math.floor(math.log10(unit)) if unit > 0 else 0
    return min(max(round(value, decimals), low), high)


def _candidate(name: str, config: TrainConfig, changes: dict[str, Any]) -> Candidate:
    own: dict[str, Any] = {}
    of_method: dict[str, Any] = {}
    shown = {}
    known = {f.name for f in dataclasses.fields(config)} - {"method", "seed"}
    paths = {f.name for f in dataclasses.fields(config) if Path in get_args(f.type)}
    known |= {f"method.{f.name}" for f in dataclasses.fields(config.method)}
    for field, value in changes.items():
        inner = field.removeprefix("method.")
        target, holder = (config.method, of_method) if inner != field else (config, own)
        if field not in known:
            raise unknown_name(f"{name}: A setting", field, known)
        shown[field] = holder[inner] = _value(value, getattr(target, inner))
        if field in paths and isinstance(holder[field], str):
            holder[field] = Path(holder[field])
    try:
        method = dataclasses.replace(config.method, **of_method)
        return Candidate(name, shown, dataclasses.replace(config, method=method, **own))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name} with {shown}: {error}") from error


def _value(value: Any, present: Any) -> Any:
    """Converts text to a Python literal if possible, and integers to float if needed."""
    if isinstance(value, str):
        if isinstance(present, str):
            return value
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return float(value) if isinstance(present, float) and is_whole else value
