"""Tunes each arm on held-out training owners, and returns the best settings."""

import functools
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from dpoptax.training.errors import ConfigError
from dpoptax.training.run import files
from experiments.run_once import read_lines, record_once
from experiments.text.arms import Chosen, Problems, train_arm

HELD_OUT = 0.2  # share of the training owners

_Key = tuple[tuple[str, float], ...]
Grid = Mapping[str, tuple[float, ...]]
GRIDS: Mapping[bool, tuple[Grid, Grid]] = {
    True: (
        {"rate": (0.05, 0.1, 0.2), "clip": (0.1, 0.3)},
        {"lora_rate": (0.001, 0.003, 0.01), "lora_clip": (0.1, 0.3), "rate": (0.01,)},
    ),
    False: (
        {"rate": (0.02, 0.05, 0.1), "steps": (100, 400)},
        {"lora_rate": (0.001, 0.003, 0.01), "steps": (40, 120), "rate": (0.01,)},
    ),
}
"""Settings that are tried with and without privacy: for the head, and for each arm with LoRA."""


def tune(
    problems: Problems,
    data: str,
    arms: Iterable[str],
    epsilons: Iterable[float | None],
    *,
    seeds: int,
    path: Path,
) -> str:
    """Tries all settings of the arms, adds each trial to a file, and returns a table of the best.

    LoRA follows the best head of the file, so tune the head first.
    """
    held = problems.holding_out(HELD_OUT)
    rows = []
    for epsilon, arm in itertools.product(epsilons, arms):
        grid = GRIDS[epsilon is not None][arm != "head"]
        chosen = {} if arm == "head" else {"head": best(path, data, "head", epsilon)}
        for values, seed in itertools.product(itertools.product(*grid.values()), range(seeds)):
            settings = dict(zip(grid, values, strict=True))
            fields = {"data": data, "arm": arm, "epsilon": epsilon, "seed": seed}
            trial = functools.partial(
                _trial, held, arm, {**chosen, arm: settings}, epsilon, seed=seed
            )
            record_once(path, {**fields, "settings": settings}, trial)
        found = best(path, data, arm, epsilon)
        mean = _means(path, data, arm, epsilon)[_key(found)]
        told = ", ".join(f"{name} {value:g}" for name, value in found.items())
        rows.append(
            (arm, "not private" if epsilon is None else f"{epsilon:g}", told, f"{mean:.1f}")
        )
    return files.markdown_table(("arm", "ε", "best settings", "held-out accuracy"), rows)


def _trial(
    held: Problems, arm: str, chosen: Chosen, epsilon: float | None, *, seed: int
) -> dict[str, float]:
    problem, trained = train_arm(held, arm, chosen, epsilon, seed=seed)
    return {"accuracy": problem.accuracy(trained.params)}


def best(path: Path, data: str, arm: str, epsilon: float | None) -> dict[str, float]:
    """Returns the settings with the highest mean accuracy.

    They are those of the nearest ε that was tried, and of other data sets if this one was not tried
    there.
    """
    found = _means(path, data, arm, epsilon)
    if not found:
        raise ConfigError(
            f"`trials` must have trials of {data}, {arm}, got {str(path)!r} without them. Run with "
            "`--tune` first, the head before LoRA."
        )
    top = max(found, key=found.__getitem__)
    return dict(top)


def _means(path: Path, data: str, arm: str, epsilon: float | None) -> dict[_Key, float]:
    private = epsilon is not None
    rows = [row for row in read_lines(path) if row["arm"] == arm]
    rows = [row for row in rows if (row["epsilon"] is not None) == private]
    if epsilon is not None and rows:
        at = epsilon
        tried = {row["epsilon"] for row in rows}
        nearest = min(tried, key=lambda value: abs(math.log(value / at)))
        rows = [row for row in rows if row["epsilon"] == nearest]
    rows = [row for row in rows if row["data"] == data] or rows
    accuracies: defaultdict[_Key, list[float]] = defaultdict(list)
    for row in rows:
        accuracies[_key(row["settings"])].append(row["accuracy"])
    return {settings: statistics.fmean(values) for settings, values in accuracies.items()}


def _key(settings: Mapping[str, float]) -> _Key:
    return tuple(settings.items())
