"""Sweeps over settings of configs and publishes the best trial."""

import contextlib
import dataclasses
import hashlib
import json
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

import dpoptax
from dpoptax.runs import Hidden, RunIdentity, data_of
from dpoptax.training import cache_folder
from dpoptax.training.bars import Bar
from dpoptax.training.config import Config
from dpoptax.training.errors import ConfigError
from dpoptax.training.evaluation import Evaluation
from dpoptax.training.parameters import load_params
from dpoptax.training.run import files
from dpoptax.training.run.announcer import say
from dpoptax.training.run.checkpoints import let_no_other_in
from dpoptax.training.search import settings
from dpoptax.training.search.price import Price, Sweep, describe_choice, likely_number, notes, price
from dpoptax.training.search.results import SweepResult, TrialResult
from dpoptax.training.search.trials import (
    Trial,
    forget_identities,
    held_out_task,
    record_path,
    run_trials,
    score_of,
    sum_identity,
    task_of,
    whole_task,
    with_flags,
)
from dpoptax.training.task import PlainPlan, Task

if TYPE_CHECKING:
    from dpoptax.accounting import Guarantee


def run_sweep(configs: dict[str, Config], sweep: Sweep, *, progress: bool = True) -> SweepResult:
    """Runs a sweep over named configs and writes its files.

    Raises:
        ConfigError: A setting is unknown, the configs are not comparable, or the directory holds
            another sweep.
    """
    trials = sweep.workdir / "trials"
    cache_folder.make_private(trials)  # records contain seeds, which reveal the noise
    with contextlib.ExitStack() as stack:
        let_no_other_in(trials, stack)
        forget_identities()
        record = _sweep_record(configs, sweep)
        ready = prepare(configs, sweep, record["seed"], progress=progress)
        priced = {"The noise of each trial": Hidden(files.to_json(ready.price))}
        identity = RunIdentity({**_options(configs, sweep), **_sums(configs, ready), **priced})
        identity.check_continues(
            record.setdefault("identity", identity.record()), f"the sweep in {sweep.workdir}"
        )
        # Written after all checks and before the first trial, because a second start must use the
        # same seeds.
        if not (sweep.workdir / "sweep.json").is_file():
            files.write_json(sweep.workdir / "sweep.json", record, secret=True)
        ready = ready._replace(whole=[], held_out=[])  # frees their arrays
        return _run(record, sweep, ready, progress=progress)


class Prepared(NamedTuple):
    """A sweep that was checked and priced.

    Attributes:
        whole: The task of each config that trains on all examples.
        held_out: The task of each config that trains on four fifths of them.
        candidates: The settings.
        chosen: The index of each trial's setting.
        price: The price.
        guarantee: The guarantee of the result, if there is one.
    """

    whole: list[Task]
    held_out: list[Task]
    candidates: list[settings.Candidate]
    chosen: list[int]
    price: Price
    guarantee: "Guarantee | None"


def _sums(configs: dict[str, Config], ready: Prepared) -> dict[str, Any]:
    """Returns the data and the programs of the configs, which no second start may change."""
    sums = {
        (f"{name} of {label}" if len(configs) > 1 else name): value
        for (label, config), task in zip(configs.items(), ready.held_out, strict=True)
        for name, value in sum_identity(with_flags(config, held_out=True), task).values.items()
    }
    # With the examples that are held out.
    return {**sums, **data_of(ready.whole[0].data, whole=False)}


def dry_run(configs: dict[str, Config], sweep: Sweep, *, progress: bool = True) -> list[str]:
    """Returns the privacy statements of a sweep without training or writing anything.

    Raises:
        ConfigError: As for `run_sweep`.
    """
    record = _sweep_record(configs, sweep)
    said = notes(sweep, prepare(configs, sweep, record["seed"], progress=progress).price)
    if sweep.repetitions != "fixed":
        said.append(f"The sweep trains a secret number of trials, {likely_number(sweep)}.")
    if "identity" not in record and sweep.repetitions == "fixed" and sweep.trials:
        said.append(
            "The settings are drawn when the sweep starts. If their costs differ, this price is "
            "for other draws."
        )
    return said


def _run(record: dict[str, Any], sweep: Sweep, ready: Prepared, *, progress: bool) -> SweepResult:
    """Trains the missing trials and writes the files."""
    settled = [ready.candidates[which] for which in ready.chosen]
    cost, guarantee = ready.price, ready.guarantee
    trials = [
        Trial(
            # The seed of the published parameters must not reveal the number of the trial.
            with_flags(one.config, seed=_seed(record["seed"], f"params {index}"), held_out=True),
            use=f"trial {index}",
            secret=record["seed"],
        )
        for index, one in enumerate(settled)
    ]
    directory = sweep.workdir / "trials"
    secret = sweep.repetitions != "fixed"  # the number of trials, and all but the best
    if secret and progress:  # output is often kept
        say(f"training a secret number of trials, {likely_number(sweep)}")
        say(f"finished ones appear in {directory} ...")
    shown = progress and not secret
    with Bar(total=len(trials), unit="trial", desc="sweep", disable=not shown) as bar:
        found = run_trials(directory, trials, bar)
    scores = _scores(found, cost, record["seed"])
    rows = [
        TrialResult({"config": one.name, **one.changes}, score, record_path(directory, trial).name)
        for one, trial, score in zip(settled, trials, scores, strict=True)
    ]
    rank = cost.score.rank
    best = max(range(len(rows)), key=lambda index: rank(rows[index].score), default=None)
    published = None
    if best is not None:
        params = record_path(directory, trials[best]).with_suffix(".msgpack")
        published = _publish(rows[best], trials[best].config, found[best], params, cost, sweep)
        if guarantee is not None:
            choice = describe_choice(sweep)
            text = guarantee.statement(
                public_data="which examples were held out for this choice, and __________",
                model=files.described_file(sweep.workdir / "best" / "params.msgpack"),
                **({} if secret else {"settings": f"{choice}, which the numbers include"}),
            )
            files.write_text(sweep.workdir / "best" / files.STATEMENT, text)
    results = SweepResult(cost, notes(sweep, cost), rows, best, published, files.versions())
    listed = sweep.workdir / "trials.md"
    if secret:
        files.make_secret(listed)
    listed.write_text(table(results) + "\n", encoding="utf-8")
    files.write_json(sweep.workdir / "sweep.json", record | vars(results), secret=True)
    return results


def prepare(
    configs: dict[str, Config], sweep: Sweep, seed: int, *, progress: bool = False
) -> Prepared:
    """Returns a sweep that is checked and priced.

    Nothing is trained. Pricing takes seconds per setting; `progress` shows a bar.

    Raises:
        ConfigError: As for `run_sweep`.
    """
    whole = [whole_task(config) for config in configs.values()]
    held_out = [held_out_task(c, task) for c, task in zip(configs.values(), whole, strict=True)]
    candidates, chosen = _drawn(configs, sweep, seed)
    if progress:
        say("computing the cost of the sweep ...")
    tasks = held_out  # They have the costs of all that can be drawn.
    if not sweep.random or sweep.repetitions == "fixed":
        options: Any = {"unit": "setting", "delay": 1, "leave": False, "disable": not progress}
        with Bar(candidates, "price", **options) as bar:
            tasks = [task_of(with_flags(one.config, held_out=True, seed=0)) for one in bar]
    _check_tasks(tasks)
    if tasks is held_out:
        _check_each_priced(candidates, tasks)
    cost, guarantee = price(tasks, sweep, chosen)
    evaluate = cast(Evaluation, tasks[0].evaluate)
    cost = dataclasses.replace(cost, held_out_size=evaluate.size, score=score_of(tasks))
    return Prepared(whole, held_out, candidates, chosen, cost, guarantee)


def _check_tasks(tasks: list[Task]) -> None:
    """Raises a ConfigError unless a sweep over these tasks has a price."""
    plans = [task.plan for task in tasks if not isinstance(task.plan, PlainPlan)]
    sizes = (cast(Evaluation, task.evaluate).size for task in tasks)
    drawn = ((task.dataset, task.plan.sampler.dataset_size) for task in tasks)
    if len(set(zip(drawn, sizes, strict=True))) > 1:
        raise ConfigError("The data must be the same for all trials. Use configs of one data set.")
    if len(deltas := {plan.delta for plan in plans}) > 1:
        raise ConfigError(f"`delta` must be the same for all trials, got {sorted(deltas)}.")
    if any(task.users is not None for task in tasks):
        raise ConfigError(
            "`users` must be None in a sweep. A user may own both training and held-out examples, "
            "which the price of a sweep does not cover. Omit it, or choose the settings on public "
            "data."
        )
    if any(plan.also for plan in plans):
        raise ConfigError(
            "`also` must be empty in a sweep, because its events would count once for each trial. "
            "Choose the settings on public data, or compose the guarantee of the sweep."
        )
    for task in tasks:
        if not cast(Evaluation, task.evaluate).has_score(task.params, mean=True):
            raise ConfigError(
                f"The score of {task.name} must be one number for each held-out example in a "
                "sweep, with a finite `score_range`. The sensitivity of other scores is not known, "
                "such as an AUC, a loss without a bound, or a mean over tokens. Pass "
                "`Evaluation(…, score=…, score_range=…)` of such a metric."
            )


def table(results: SweepResult) -> str:
    """Returns the trials as a Markdown table, the best first, with notes."""
    score = results.price.score
    rows = sorted(results.trials, key=lambda row: -score.rank(row.score))
    lines = [
        files.markdown_table(
            (score.label("held-out"), *rows[0].settings),
            [(score.text(row.score), *map(str, row.settings.values())) for row in rows],
        )
        if rows
        else "No trial was drawn.",
        "",
        *(f"- {note}" for note in results.notes),
    ]
    return "\n".join(lines)


def _sweep_record(configs: dict[str, Config], sweep: Sweep) -> dict[str, Any]:
    """Returns the seed of the sweep, with its identity if its directory holds it.

    Raises:
        OtherRunError: The directory holds a sweep with other options or config files.
    """
    path = sweep.workdir / "sweep.json"
    if not path.is_file():
        return {"seed": secrets.randbits(256)}
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    options = RunIdentity(_options(configs, sweep))
    options.check_continues(record["identity"], f"the sweep in {sweep.workdir}", part=True)
    return record


def _options(configs: dict[str, Config], sweep: Sweep) -> dict[str, Any]:
    """Returns the options of a sweep and its configs, as parts of its identity."""
    given = {
        f"`{name}`": value for name, value in dataclasses.asdict(sweep).items() if name != "workdir"
    }
    described = {name: config.described() for name, config in configs.items()}
    found: dict[str, Any] = files.plain({**given, "`configs`": described})
    digests = {f"The config file of {n}": Hidden(config.digest) for n, config in configs.items()}
    return {**found, **digests}


def _drawn(
    configs: dict[str, Config], sweep: Sweep, seed: int
) -> tuple[list[settings.Candidate], list[int]]:
    """Draws the candidates, and the index of each trial's candidate."""
    count = sweep.trials or 0
    if sweep.repetitions != "fixed":
        count = dpoptax.accounting.selection.draw_number(
            count, sweep.repetitions, _seed(seed, "number")
        )
    rng = np.random.default_rng(_seed(seed, "settings"))
    if sweep.random:
        candidates = settings.random_candidates(configs, sweep.random, count, rng)
        return candidates, list(range(count))
    candidates = settings.grid_candidates(configs, sweep.grid)
    if sweep.repetitions == "fixed" and sweep.trials is None:
        return candidates, list(range(len(candidates)))
    return candidates, [int(which) for which in rng.integers(len(candidates), size=count)]


def _check_each_priced(candidates: list[settings.Candidate], tasks: list[Task]) -> None:
    """Raises a `ConfigError` if the cost of a drawn setting was not priced."""
    costs = [_cost(task) for task in tasks]
    for candidate in candidates:
        if _cost(with_flags(candidate.config, held_out=True, seed=0).task()) not in costs:
            raise ConfigError(
                f"A drawn setting must not change the privacy cost of a trial, got "
                f"{candidate.name} with {candidate.changes}. Pass its values with --grid, or use "
                "fixed repetitions."
            )


def _cost(task: Task) -> Any:
    """Returns a value that is equal for tasks with the same privacy cost."""
    planned, plan = task.guarantee(), task.plan
    if planned is None or isinstance(plan, PlainPlan):
        return None
    return planned.event.dp_event, planned.accountant, planned.stated_delta, plan.strategy


def _scores(found: list[dict[str, Any]], cost: Price, seed: int) -> list[float]:
    """Returns held-out scores with noise on their sum over examples.

    The noise belongs to one score. Another one in its place would have other noise.
    """
    size, scores = cost.held_out_size, []
    for index, record in enumerate(found):
        score = cost.score.of(record)
        rng = np.random.default_rng(_seed(seed, f"score {index} {score!r}"))
        scores.append((size * score + cost.score.size * cost.score_stddev * rng.normal()) / size)
    return scores


def _publish(
    row: TrialResult, config: Config, found: dict[str, Any], params: Path, cost: Price, sweep: Sweep
) -> dict[str, Any]:
    """Writes best/: parameters and config of the best trial, and its test accuracy."""
    task = with_flags(config, held_out=False).task()
    metrics = cast(Evaluation, task.evaluate)(load_params(params, task.params))
    directory = sweep.workdir / "best"
    directory.mkdir(exist_ok=True)
    shutil.copyfile(params, directory / "params.msgpack")
    described = config.described()
    described.pop("epsilon", None)  # it would be that of a trial
    result = {
        "epsilon": cost.epsilon,
        "delta": found["delta"],
        "guarantee_of": describe_choice(sweep),
        "epsilon_of_one_trial": cost.of_one_trial,
        "config": described,
        "changes": row.settings,
        "score": row.score,
        **metrics,
        "params_sha256": found["params_sha256"],
    }
    files.write_json(directory / "summary.json", result)
    return result


def _seed(seed: int, use: str) -> int:
    """Derives a seed for each use from the seed of a sweep, which it does not reveal."""
    return int.from_bytes(hashlib.shake_256(f"{seed} {use}".encode()).digest(8)) >> 1
