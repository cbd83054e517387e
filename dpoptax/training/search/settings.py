"""Parses settings of configs from the command line and draws candidates."""

import ast
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpoptax.training.config import Config
from dpoptax.training.errors import ConfigError

Configs = dict[str, Config]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config with changed arguments.

    Attributes:
        name: Name of the original config.
        changes: Changed arguments and their values.
        config: The changed config.
    """

    name: str
    changes: dict[str, Any]
    config: Config


def grid_candidates(configs: Configs, given: Sequence[str]) -> list[Candidate]:
    """Returns all combinations of NAME=VALUE,VALUE,... for every config.

    Raises:
        ConfigError: An argument is unknown.
    """
    axes = [(name, text.split(",")) for name, text in _parsed(given)]
    return [
        _candidate(label, config, dict(zip([name for name, _ in axes], values, strict=True)))
        for label, config in configs.items()
        for values in itertools.product(*(values for _, values in axes))
    ]


def with_values(configs: Configs, given: Sequence[str]) -> Configs:
    """Returns the configs with the values of NAME=VALUE, which may contain commas.

    Raises:
        ConfigError: An argument is unknown.
    """
    values = dict(_parsed(given, "NAME=VALUE"))
    return {name: _candidate(name, config, values).config for name, config in configs.items()}


def random_candidates(
    configs: Configs, given: Sequence[str], count: int, rng: np.random.Generator
) -> list[Candidate]:
    """Draws `count` candidates: a config and a value for each argument.

    Raises:
        ConfigError: An argument is unknown, or its range is invalid.
    """
    axes, names = _parsed(given), list(configs)
    drawn = []
    for _ in range(count):
        name = names[int(rng.integers(len(names)))]
        values = {argument: _draw(argument, text, rng) for argument, text in axes}
        drawn.append(_candidate(name, configs[name], values))
    return drawn


def _parsed(given: Sequence[str], form: str = "NAME=VALUE,VALUE,...") -> list[tuple[str, str]]:
    pairs = []
    for text in given:
        name, separator, values = text.partition("=")
        if not (name and separator and values):
            raise ConfigError(f"A setting must have the form {form}, got {text!r}.")
        pairs.append((name.replace("-", "_"), values))
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"Settings must name each argument once, got {', '.join(names)}. Pass all values of an "
            "argument together."
        )
    return pairs


def _draw(name: str, text: str, rng: np.random.Generator) -> Any:
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
            f"`{name}` must be a range log:LOW:HIGH, uniform:LOW:HIGH or int:LOW:HIGH with LOW "
            f"below HIGH, got {text}."
        )
    if kind == "log":
        if low <= 0:
            raise ConfigError(f"`{name}` must be a logarithmic range with LOW above 0, got {text}.")
        drawn = math.exp(rng.uniform(math.log(low), math.log(high)))
    elif kind == "int":
        return int(rng.integers(int(low), int(high) + 1))
    else:
        drawn = rng.uniform(low, high)
    return min(max(float(f"{drawn:.4g}"), low), high)


def _candidate(name: str, config: Config, changes: dict[str, Any]) -> Candidate:
    config.replace(**changes)  # raises for unknown names
    if "seed" in changes:
        raise ConfigError(f"{name}: A setting must not be the seed, which each run has for itself.")
    flags = config.flags
    shown = {each: _value(value, flags[each].default) for each, value in changes.items()}
    return Candidate(name, shown, config.replace(**shown))


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
