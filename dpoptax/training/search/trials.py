"""Trains many runs, and reuses finished ones.

A run is a function of its config with its key, its program and its data. A killed run starts again.
With the same noise on the same batches, it repeats its releases and adds none.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from dpoptax.runs import Hidden, RunIdentity, settings
from dpoptax.training.bars import Bar
from dpoptax.training.config import Config
from dpoptax.training.errors import ConfigError
from dpoptax.training.evaluation import Evaluation, Score
from dpoptax.training.parameters import save_params
from dpoptax.training.run import files, seeds
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.program import RunProgram
from dpoptax.training.run.run_task import run_task
from dpoptax.training.task import Task
from dpoptax.training.train_config import summarize

# Identities of configs without their seeds, which `forget_identities` empties.
_IDENTITIES: dict[Any, RunIdentity] = {}


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of a comparison or sweep.

    Attributes:
        config: Config of the run, with a seed and `held_out`.
        use: Names the use of the trial's key, such as its number in a sweep.
        secret: Seed of a sweep, from which the key is derived. The trial then evaluates its final
            parameters only, and writes them next to the record. None: the config's seed.
    """

    config: Config
    use: str = ""
    secret: int | None = dataclasses.field(default=None, repr=False)


def record_path(directory: Path, trial: Trial, made_by: str = "") -> Path:
    """Returns the file of a trial's record; its parameters are next to it as .msgpack.

    `made_by` states code and versions, of which other records are not reused.
    """
    parts = [described(trial), trial.secret is not None, trial.use, made_by]
    name = hashlib.sha256(files.to_json(parts).encode()).hexdigest()[:16]
    return directory / f"{name}.json"


def run_trials(
    directory: Path, trials: Sequence[Trial], bar: Bar, made_by: str = ""
) -> list[dict[str, Any]]:
    """Returns the summary of each trial with its "history", in order.

    Records are stored in `directory`, and those found there are not trained again. `bar` counts
    found and finished trials. A nested bar shows the steps of a trial.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths = [record_path(directory, trial, made_by) for trial in trials]
    for path, trial in zip(paths, trials, strict=True):
        if not path.is_file():
            _run(trial, path, progress=not bar.disable)
        bar.update()
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def task_of(config: Config) -> Task:
    """Returns the task of a config, checked for a comparison by its score.

    Raises:
        ConfigError: The task has no `Evaluation` with its score among the metrics.
    """
    task = config.task()
    evaluate = task.evaluate
    if not isinstance(evaluate, Evaluation) or not evaluate.has_score(task.params):
        score = evaluate.score.name if isinstance(evaluate, Evaluation) else Score().name
        raise ConfigError(
            f"`evaluate` of {config.name} must be an `Evaluation` with the metric {score!r}, by "
            f"which runs are compared, got {evaluate!r}."
        )
    return task


def score_of(tasks: Iterable[Task]) -> Score:
    """Returns the score by which tasks of `task_of` are compared.

    Raises:
        ConfigError: They have different scores.
    """
    scores = {cast(Evaluation, task.evaluate).score for task in tasks}
    if len(scores) > 1:
        raise ConfigError(
            "`score` and `score_range` must be the same for all configs, got "
            f"{', '.join(sorted(map(str, scores)))}."
        )
    return scores.pop()


def with_flags(config: Config, **values: Any) -> Config:
    """Returns the config with values of arguments that comparisons and sweeps set.

    Raises:
        ConfigError: The config lacks one of them.
    """
    lacking = sorted(values.keys() - config.flags.keys())
    if lacking:
        raise ConfigError(
            f"The config {config.name} must have the arguments {', '.join(sorted(values))}, got no "
            f"{', '.join(lacking)}. `seed: int | None = None` sets the initial parameters, and "
            "`held_out: bool = False` trains on four fifths of the data and tests on the others."
        )
    return config.replace(**values)


def whole_task(config: Config) -> Task:
    """Returns the task of a config that trains on all examples, with the seed 0."""
    return task_of(with_flags(config, seed=0, held_out=False))


def held_out_task(config: Config, whole: Task) -> Task:
    """Returns the task of a config with `held_out`, whose metrics must be on other examples.

    The price of a sweep counts an example as trained on or held out, not both.

    Args:
        config: The config.
        whole: From `whole_task`.

    Raises:
        ConfigError: The config ignores the argument.
    """
    held_out = task_of(with_flags(config, seed=0, held_out=True))
    digests = {cast(Evaluation, t.evaluate).digest(t.params) for t in (whole, held_out)}
    if len(digests) == 1:
        raise ConfigError(
            f"`held_out=True` of {config.name} must evaluate on examples that it does not train "
            "on, got the same ones as `held_out=False`. Use `load_digits(held_out=held_out)`, or "
            "`Dataset.for_selection`."
        )
    return held_out


def forget_identities() -> None:
    """Computes all identities anew, because data or code may have changed since a last command."""
    _IDENTITIES.clear()


def sum_identity(config: Config, task: Task | None = None) -> RunIdentity:
    """Returns the data and the programs of a config, equal for all seeds.

    `task` is that of the config with the seed 0, if it is known.
    """
    config = config.replace(seed=0)
    known_by = config.function, files.to_json([_values(config), settings()])
    if known_by not in _IDENTITIES:
        task = task_of(config) if task is None else task
        found = RunProgram(task).identity_of_any_run()
        digest = cast(Evaluation, task.evaluate).digest(task.params)
        values = {**found.values, "`evaluate`, with its examples,": Hidden(digest)}
        _IDENTITIES[known_by] = RunIdentity(values)
    return _IDENTITIES[known_by]


def _values(config: Config) -> dict[str, Any]:
    """Returns the arguments of a config as JSON values."""
    return {name: repr(flag.default) for name, flag in config.flags.items()}


def described(trial: Trial) -> list[Any]:
    """Returns everything that decides a trial: arguments, file, program and data."""
    config = trial.config
    return [config.name, config.digest, _values(config), sum_identity(config).digest()]


def _key(trial: Trial) -> Any:
    """Returns the noise key of a trial. Another program or data set has other noise."""
    seed = trial.config.flags["seed"].default
    if trial.secret is None:
        return seeds.key_of(seed, "threefry")
    text = files.to_json([trial.secret, trial.use, *described(trial)])
    return seeds.hashed_key(text.encode())


def _run(trial: Trial, path: Path, *, progress: bool = False) -> None:
    """Trains a trial and writes its record atomically."""
    task = task_of(trial.config)
    if trial.secret is not None:
        task = dataclasses.replace(task, eval_every=task.plan.steps)
    result = run_task(task, key=_key(trial), progress=progress)
    if trial.secret is not None:
        final = averaged(result.params, result.opt_state)
        save_params(path.with_suffix(".msgpack"), final)
    seed = trial.config.flags["seed"].default
    given = trial.config.described() | {"seed": seed}
    summary = {**summarize(task, result), "config": given}
    if f"test_{score_of([task]).name}" not in summary:
        raise ConfigError(f"`combine` of {trial.config.name} must return the score, got {summary}.")
    files.write_json(path, {**summary, "history": result.history})
