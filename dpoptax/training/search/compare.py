"""Compares configs at one ε, with equal tuning and equal seeds."""

import dataclasses
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

from dpoptax.runs import RunIdentity
from dpoptax.training.bars import Bar
from dpoptax.training.config import TrainConfig
from dpoptax.training.data.fingerprints import identity_of
from dpoptax.training.errors import ConfigError
from dpoptax.training.methods import DPSGD
from dpoptax.training.run import records
from dpoptax.training.run.privacy import make_run_plan
from dpoptax.training.search import settings
from dpoptax.training.search.results import (
    ComparisonResult,
    GridPoint,
    MethodResult,
    method_result,
)
from dpoptax.training.search.trials import Runner, Trial, dataset_of


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Options of `dpoptax compare`.

    For every config, each learning rate is first trained on every seed with a fifth of the training
    split held out. The rate with the best mean accuracy on that fifth is selected. It is then
    trained on the whole training split, once per seed. Only these runs use the test split. The
    stated ε is that of one such run. It does not cover the repetitions or the selection.
    """

    workdir: Path
    """Directory for results.json, table.md, comparison.png and the records of runs in runs/.
    Finished runs with the same code, settings and program are not trained again, so the same
    command resumes a comparison, and more configs train only missing runs. data.json, which only
    its owner can read, detects other examples under the name of a data set."""
    seeds: int = 5
    """Number of repetitions, with the seeds 0, 1, 2, ... for every config. These seeds are known,
    so publish none of the models."""
    epsilon: float | None = None
    """ε of every private config. None: the common ε of the configs."""
    factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    """Grid of learning rates, as multiples of the config's own. With --set learning_rate=1, they
    are the rates themselves."""
    steps: int | None = None
    """Number of steps of every config; None: the configs' own."""
    set: tuple[str, ...] = ()
    """FIELD=VALUE for any other field of every config, such as optimizer=adam. method.FIELD=VALUE
    sets a field of the methods."""
    trial_seeds: int | None = None
    """Number of seeds to try each learning rate on. None: all."""
    processes: int = 1
    """Number of concurrent runs. Their times do not compare with those of single runs."""

    def __post_init__(self) -> None:
        records.check_count("seeds", self.seeds)
        if self.trial_seeds is not None and not 1 <= self.trial_seeds <= self.seeds:
            raise ConfigError(
                f"`trial_seeds` must be between 1 and seeds={self.seeds}, got {self.trial_seeds}."
            )
        if not self.factors or not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError(f"`factors` must be positive and finite, got {self.factors}.")


def compare(
    configs: dict[str, TrainConfig], comparison: Comparison, *, progress: bool = True
) -> ComparisonResult:
    """Compares named configs, writes the files and returns the results.

    Raises:
        ConfigError: The configs are not comparable.
    """
    configs, epsilon, delta = _on_one_footing(configs, comparison)
    for config in reversed(configs.values()):  # computes features before any run
        dataset = dataset_of(config, held_out=False, progress=progress)
    data = comparison.workdir / "data.json"
    known = _known_data(configs, data)
    size = dataset.units(config.unit)
    configs = _with_noise(configs, epsilon, size)
    names = _names(configs)
    for config in configs.values():  # raises all errors before the first long run
        make_run_plan(config, size)
    comparison.workdir.mkdir(parents=True, exist_ok=True)
    records.write_json(data, known, secret=True)

    versions, code = records.versions(), records.source_sha256()
    made_by = records.to_json({"code": code, **versions})
    runner = Runner(comparison.workdir / "runs", comparison.processes, made_by)
    seeds, factors = range(comparison.seeds), sorted(set(comparison.factors))
    tried_on = seeds[: comparison.trial_seeds] if len(factors) > 1 else range(0)
    total = len(configs) * (len(factors) * len(tried_on) + len(seeds))
    with Bar(total=total, unit="run", desc="compare", disable=not progress) as bar:
        grids = _grids(list(configs.values()), factors, tried_on, runner, bar)
        rates = [max(grid, key=_validation_accuracy).learning_rate for grid in grids]
        trials = [
            Trial(dataclasses.replace(config, learning_rate=rate, seed=seed))
            for config, rate in zip(configs.values(), rates, strict=True)
            for seed in seeds
        ]
        runs = iter(runner.run(trials, bar))
    methods = [
        method_result(name, label, rate, grid, [next(runs) for _ in seeds])
        for name, label, rate, grid in zip(names, configs, rates, grids, strict=True)
    ]
    notes = _notes(methods)
    results = ComparisonResult(
        dataset.name, epsilon, delta, list(seeds), notes, methods, versions, code
    )
    # Imported late, because matplotlib is slow to import.
    from dpoptax.training.search import comparison_figure

    (comparison.workdir / "table.md").write_text(table(results) + "\n", encoding="utf-8")
    comparison_figure.plot_comparison(results, comparison.workdir / "comparison.png")
    records.write_json(comparison.workdir / "results.json", results)
    return results


def _known_data(configs: dict[str, TrainConfig], path: Path) -> dict[str, Any]:
    """Returns the content of data.json, the identities of all data sets by name.

    Raises:
        OtherRunError: Earlier runs used other examples under the same name. Accuracies on other
            data do not compare, and runs with one seed would add the same noise to gradients of two
            data sets.
    """
    known: dict[str, Any] = {}
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
    for config in configs.values():
        name = f"{config.unit}s of {dataclasses.replace(config.data(), data_dir=None)}"
        now = RunIdentity(identity_of(dataset_of(config, held_out=False), test=True))
        now.check_continues(known.setdefault(name, now.record()), f"earlier runs in {path.parent}")
    return known


def _grids(
    configs: list[TrainConfig], factors: list[float], seeds: range, runner: Runner, bar: Bar
) -> list[list[GridPoint]]:
    """Returns the learning rates of each config with their accuracies on the held-out fifth."""
    rates = [[factor * config.learning_rate for factor in factors] for config in configs]
    trials = [
        Trial(dataclasses.replace(config, learning_rate=rate, seed=seed), held_out=True)
        for config, own in zip(configs, rates, strict=True)
        for rate in own
        for seed in seeds
    ]
    accuracies = (run["test_accuracy"] for run in runner.run(trials, bar))
    return [[GridPoint(rate, [next(accuracies) for _ in seeds]) for rate in own] for own in rates]


def _validation_accuracy(point: GridPoint) -> float:
    return statistics.fmean(point.validation_accuracies or [0.0])


def _on_one_footing(
    configs: dict[str, TrainConfig], comparison: Comparison
) -> tuple[dict[str, TrainConfig], float | None, float | None]:
    """Returns the configs at a common ε and δ, or raises a ConfigError."""
    configs = _with_values(configs, comparison)
    private = {
        name: config
        for name, config in configs.items()
        if config.method.private and config.method.unproven() is None
    }
    epsilon = comparison.epsilon
    if epsilon is None and private:
        epsilon = _common("epsilon", private, "--epsilon")
    delta = _common("delta", private, "--set delta=VALUE") if private else None
    if len({(config.dataset, config.data_dir) for config in configs.values()}) > 1:
        _common("dataset", configs, "--set dataset=NAME, or configs of one data set")
        raise ConfigError("`data_dir` must be the same for all configs. Pass --data-dir.")
    _common("unit", configs, "--set records_per_user=VALUE")
    calibrated: dict[str, Any] = {"epsilon": epsilon, "noise_multiplier": None}
    configs = configs | {
        name: dataclasses.replace(config, **calibrated) for name, config in private.items()
    }
    return configs, epsilon, delta


def _with_noise(
    configs: dict[str, TrainConfig], epsilon: float | None, dataset_size: int
) -> dict[str, TrainConfig]:
    """Sets the noise of methods without a proof to that of DP-SGD at this ε."""

    def noisy(config: TrainConfig) -> TrainConfig:
        if config.method.unproven() is None or config.noise_multiplier is not None:
            return config
        counterpart = dataclasses.replace(config, method=DPSGD(), epsilon=epsilon)
        multiplier = make_run_plan(counterpart, dataset_size).noise_multiplier
        return dataclasses.replace(config, epsilon=None, noise_multiplier=multiplier)

    return {name: noisy(config) for name, config in configs.items()}


def _with_values(configs: dict[str, TrainConfig], comparison: Comparison) -> dict[str, TrainConfig]:
    """Returns the configs with all options of the comparison except ε."""
    options = {"seed": "--seeds", "noise_multiplier": "--epsilon"}  # chosen by the comparison
    for text in comparison.set:
        field = text.partition("=")[0].replace("-", "_")
        if field in options:
            raise ConfigError(
                f"`set` must not contain {field}, got {text!r}. Pass {options[field]} instead."
            )
    given = [] if comparison.steps is None else [f"steps={comparison.steps}"]
    return settings.with_values(configs, [*comparison.set, *given])


def _common(field: str, configs: dict[str, TrainConfig], remedy: str) -> Any:
    values = {name: getattr(config, field) for name, config in configs.items()}
    if len(set(values.values())) > 1 or None in values.values():
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise ConfigError(
            f"`{field}` must be the same for all configs, got {listed}. Pass {remedy}."
        )
    return next(iter(values.values()))


def _names(configs: dict[str, TrainConfig]) -> list[str]:
    """Returns the names of the methods, with config names if several share one."""
    names = [config.method.name for config in configs.values()]
    shared = os.path.commonprefix(list(configs)).rpartition("/")[0]
    labels = [label.removeprefix(f"{shared}/") if shared else label for label in configs]
    return [
        name if names.count(name) == 1 else f"{name} ({label})"
        for name, label in zip(names, labels, strict=True)
    ]


def _notes(methods: list[MethodResult]) -> list[str]:
    notes = []
    if any(len(method.grid) > 1 for method in methods):
        notes.append(
            "Each learning rate was selected on a held-out fifth of the training split. The test "
            "split was used for the reported accuracy only."
        )
    if any(method.test_accuracy_std is not None for method in methods):
        notes.append(
            "± is the standard deviation of the accuracy over seeds. In comparison.png, it is the "
            "standard error of the mean difference, paired by seed."
        )
    if any(method.private for method in methods):
        notes.append(
            "ε is that of one run at the selected learning rate. It covers neither the runs that "
            "selected the rate nor the repetitions over seeds. The seeds are known, so publish "
            "none of these models: `dpoptax train` draws a secret seed."
        )
    if any(run["unit"] == "user" for method in methods for run in method.runs):
        notes.append("The unit of ε is a user with all of its examples.")
    notes += [f"{method.name}: {method.unproven}." for method in methods if method.unproven]
    for method in methods:
        rates = [point.learning_rate for point in method.grid]
        if len(rates) > 1 and method.learning_rate in (min(rates), max(rates)):
            notes.append(
                f"{method.name}: the selected learning rate {method.learning_rate:g} is at "
                "the edge of its grid. A wider grid may give a better rate."
            )
    return notes


def table(results: ComparisonResult) -> str:
    """Returns the comparison as a Markdown table with notes."""
    rows = [("method", "ε", "best learning rate", "test accuracy (%)", "seconds")]
    for method in results.methods:
        accuracy = f"{100 * method.test_accuracy_mean:.2f}"
        if method.test_accuracy_std is not None:
            accuracy += f" ± {100 * method.test_accuracy_std:.2f}"
        epsilon = "none proven" if method.unproven else "∞ (not private)"
        if method.epsilon is not None:
            epsilon = records.epsilon_text(method.epsilon)
        seconds = f"{method.seconds_per_run:.2f}"
        rows.append((method.name, epsilon, f"{method.learning_rate:g}", accuracy, seconds))
    lines = records.markdown_table(rows[0], rows[1:])
    return "\n".join([lines, "", *(f"- {note}" for note in results.notes)])
