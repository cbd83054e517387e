"""Compares configs at one ε, with equal tuning and equal seeds."""

import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dpoptax.runs import to_decimals
from dpoptax.training.bars import Bar
from dpoptax.training.config import Config
from dpoptax.training.errors import ConfigError
from dpoptax.training.evaluation import Score
from dpoptax.training.run import files
from dpoptax.training.search import settings, trials
from dpoptax.training.search.comparison import Comparison
from dpoptax.training.search.results import ComparisonResult, GridPoint, MethodResult, method_result
from dpoptax.training.search.trials import (
    Trial,
    held_out_task,
    run_trials,
    score_of,
    whole_task,
    with_flags,
)
from dpoptax.training.task import Task

Configs = dict[str, Config]


def compare(configs: Configs, comparison: Comparison, *, progress: bool = True) -> ComparisonResult:
    """Compares named configs, writes the files and returns the results.

    Raises:
        ConfigError: The configs are not comparable.
    """
    trials.forget_identities()
    configs = _with_values(configs, comparison)
    tasks = [whole_task(config) for config in configs.values()]
    if len(set(comparison.factors)) > 1:
        for config, task in zip(configs.values(), tasks, strict=True):
            held_out_task(config, task)  # raises if the config ignores the argument
    score = score_of(tasks)
    epsilon, delta = _common_budget(dict(zip(configs, tasks, strict=True)))
    names = _names(configs, tasks)
    comparison.workdir.mkdir(parents=True, exist_ok=True)

    versions, code = files.versions(), files.source_sha256()
    made_by = files.to_json({"code": code, **versions})
    run = functools.partial(run_trials, comparison.workdir / "runs", made_by=made_by)
    seeds, factors = range(comparison.seeds), sorted(set(comparison.factors))
    tried_on = seeds[: comparison.trial_seeds] if len(factors) > 1 else range(0)
    total = len(configs) * (len(factors) * len(tried_on) + len(seeds))
    with Bar(total=total, unit="run", desc="compare", disable=not progress) as bar:
        grids = _grids(list(configs.values()), factors, tried_on, run, score, bar)
        rates = [_best(grid, score).learning_rate for grid in grids]
        chosen = [
            Trial(with_flags(config, learning_rate=rate, seed=seed, held_out=False))
            for config, rate in zip(configs.values(), rates, strict=True)
            for seed in seeds
        ]
        runs = iter(run(chosen, bar))
    methods = [
        method_result(name, label, grid, rate, [next(runs) for _ in seeds], score)
        for name, label, rate, grid in zip(names, configs, rates, grids, strict=True)
    ]
    notes = _notes(methods)
    if len({str(jax.tree.map(np.shape, task.params)) for task in tasks}) > 1:
        sizes = ", ".join(f"{m.name} {m.runs[0]['num_params']:,}" for m in methods)
        notes.append(f"The methods train different models. Numbers of parameters: {sizes}.")
    results = ComparisonResult(
        tasks[0].dataset, epsilon, delta, list(seeds), notes, methods, versions, code, score
    )
    # Imported late, because matplotlib is slow to import.
    from dpoptax.training.search import comparison_figure

    (comparison.workdir / "table.md").write_text(table(results) + "\n", encoding="utf-8")
    comparison_figure.plot_comparison(results, comparison.workdir / "comparison.png")
    files.write_json(comparison.workdir / "results.json", results)
    return results


def _grids(
    configs: list[Config],
    factors: list[float],
    seeds: range,
    run: Callable[..., list[dict[str, Any]]],
    score: Score,
    bar: Bar,
) -> list[list[GridPoint]]:
    """Returns the learning rates of each config with their scores on the held-out fifth."""
    rates = [
        [factor * config.flags["learning_rate"].default for factor in factors] for config in configs
    ]
    tried = [
        Trial(with_flags(config, learning_rate=rate, seed=seed, held_out=True))
        for config, own in zip(configs, rates, strict=True)
        for rate in own
        for seed in seeds
    ]
    scores = (score.of(found) for found in run(tried, bar))
    return [[GridPoint(rate, [next(scores) for _ in seeds]) for rate in own] for own in rates]


def _best(grid: list[GridPoint], score: Score) -> GridPoint:
    """Returns the rate with the best mean score, the first of equal ones."""
    means = [score.rank(statistics.fmean(point.validation_scores or [0.0])) for point in grid]
    return grid[means.index(max(means))]


def _with_values(configs: Configs, comparison: Comparison) -> Configs:
    """Returns the configs with all options of the comparison."""
    options = {"seed": "--seeds", "epsilon": "--epsilon"}  # chosen by the comparison
    for text in comparison.set:
        name = text.partition("=")[0].replace("-", "_")
        if name in options:
            raise ConfigError(
                f"`set` must not contain {name}, got {text!r}. Pass {options[name]} instead."
            )
    given = [] if comparison.steps is None else [f"steps={comparison.steps}"]
    configs = settings.with_values(configs, [*comparison.set, *given])
    for config in configs.values():
        with_flags(config, learning_rate=1.0, seed=0, held_out=False)
    if comparison.epsilon is None:
        return configs
    return {
        name: config.replace(epsilon=comparison.epsilon) if "epsilon" in config.flags else config
        for name, config in configs.items()
    }


def _common_budget(tasks: dict[str, Task]) -> tuple[float | None, float | None]:
    """Returns the common ε and δ of the private configs, None without any.

    Raises:
        ConfigError: The configs differ in ε, δ, the data or the unit of privacy.
    """
    planned = {name: task.guarantee() for name, task in tasks.items()}
    private = {name: found for name, found in planned.items() if found is not None}
    _common("The data", {n: (t.dataset, t.plan.sampler.dataset_size) for n, t in tasks.items()})
    _common("The unit of privacy", {n: t.plan.sampler.unit for n, t in tasks.items()})
    if not private:
        return None, None
    # Calibration stays below the target by at most a thousandth.
    epsilons = {name: float(f"{g.stated_epsilon:.3g}") for name, g in private.items()}
    epsilon = _common("`epsilon`", epsilons, " Pass --epsilon.")
    return epsilon, _common("`delta`", {name: g.stated_delta for name, g in private.items()})


def _common(what: str, values: dict[str, Any], remedy: str = "") -> Any:
    if len(set(values.values())) > 1:
        listed = ", ".join(f"{name}: {value}" for name, value in values.items())
        raise ConfigError(f"{what} must be the same for all configs, got {listed}.{remedy}")
    return next(iter(values.values()))


def _names(configs: Configs, tasks: list[Task]) -> list[str]:
    """Returns the names of the methods, with config names if several share one."""
    names = [task.name for task in tasks]
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
            "split was used for the reported scores only."
        )
    if any(method.test_score_std is not None for method in methods):
        notes.append(
            "± is the standard deviation over seeds. In comparison.png, it is the "
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
    score = results.score
    rows = [("method", "ε", "best learning rate", score.label("test"), "seconds")]
    for method in results.methods:
        found = score.text(method.test_score_mean)
        if method.test_score_std is not None:
            found += f" ± {score.text(method.test_score_std)}"
        epsilon = "none proven" if method.unproven else "∞ (not private)"
        if method.epsilon is not None:
            epsilon = to_decimals(method.epsilon)
        seconds = f"{method.seconds_per_run:.2f}"
        rows.append((method.name, epsilon, f"{method.learning_rate:g}", found, seconds))
    lines = files.markdown_table(rows[0], rows[1:])
    return "\n".join([lines, "", *(f"- {note}" for note in results.notes)])
