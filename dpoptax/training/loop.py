"""Trains a config, private or not, and writes or returns its result."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.data.fingerprints import fingerprint
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import devices, outputs, records, resume, seeds
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.chain import check_names
from dpoptax.training.run.checkpoints import Checkpoints
from dpoptax.training.run.course import Context, Course, Job, Record, State
from dpoptax.training.run.evaluation import Evaluator
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.outputs import RunResult
from dpoptax.training.run.phases import Phases, say
from dpoptax.training.run.privacy import RunPlan, make_plan
from dpoptax.training.run.resolved import ResolvedRun, resolve
from dpoptax.training.run.step import compile_step


def train_and_evaluate(
    config: TrainConfig, workdir: str | Path, *, progress: bool = True
) -> RunResult:
    """Trains `config` and writes the run to `workdir`, or goes on with the run there.

    The files are metrics.jsonl (a line per evaluation, written as it happens), checkpoints/,
    summary.json, params.msgpack and training.png. A run that was stopped goes on from its last
    checkpoint when called again. It ends as it would have without the stop, bit for bit.

    Args:
        config: The run.
        workdir: Directory for its files; made if missing.
        progress: Whether to show a progress bar.

    Raises:
        ValueError: A config that cannot be trained, or that is not the one of the run in `workdir`:
            another mechanism, sampler or data. The message names field, value and remedy.
        CheckpointError: A checkpoint cannot be written, or there are some and none can be read.
    """
    phases = Phases(say if progress else None)
    with phases("devices"):
        place = devices.start(config.parallel)
    main = jax.process_index() == 0
    if not main:
        phases = Phases()
    with Checkpoints(Path(workdir) / "checkpoints", config.keep_checkpoints) as checkpoints:
        with phases("checkpoints"):
            begun = resume.begun(checkpoints, Path(workdir))
        with phases("data"):
            dataset = config.data(progress=progress and main).load()
        context = Context(place, phases, checkpoints, progress=progress and main)
        return _train_in(config, dataset, Path(workdir), context, begun)


def _train_in(
    config: TrainConfig,
    dataset: Dataset,
    workdir: Path,
    context: Context,
    begun: Record | None,
) -> RunResult:
    """Trains a run, or goes on with the one that was `begun`, and writes its files."""
    main, phases = jax.process_index() == 0, context.phases
    metrics_path = workdir / resume.METRICS
    # Wrong names are reported before the noise is calibrated, which may take long.
    config.build_model(dataset.num_classes)
    check_names(config)
    seeded = resume.with_seed_of(config, begun)
    if begun is not None and begun.get("seed_given"):
        config = seeded  # so that the summary says that ε depends on a seed that was given
    with phases("accounting"):
        plan = make_plan(seeded, dataset.units(config.unit))
    with phases("init"):
        run = resolve(config, plan, num_classes=dataset.num_classes)
    earlier = resume.shown_records(metrics_path) if config.method.private else {}
    shown = max(earlier, default=0)
    if begun is not None:
        with phases("accounting"):
            resume.check_same_run(run, begun, workdir, shown)
    with outputs.metrics_file(metrics_path if main else None, shown) as observe:
        if config.fixed_point:
            observe = resume.as_shown(observe, earlier)
        context = dataclasses.replace(context, observe=observe, shown=shown)
        course = Course(*make_job(run, dataset, context), context)
        if main:  # not before: a refused start keeps the statement on the earlier run
            (workdir / "summary.json").unlink(missing_ok=True)
        result = _result(run, course, dataset.name)
        # Under the lock: parameters of another process would end up next to this summary.
        return _written(result, workdir, phases) if main else result


def _written(result: RunResult, workdir: Path, phases: Phases) -> RunResult:
    """Writes the files of a finished run, the summary last, and returns it with its times."""
    with phases("files"):
        outputs.write(result, workdir)
    summary = {**result.summary, "phases": phases.seconds()}
    seeded = result.summary["config"]["seed"] is not None  # which tells the noise
    records.write_json(workdir / "summary.json", summary, secret=seeded)
    return dataclasses.replace(result, summary=summary)


def train(
    config: TrainConfig,
    dataset: Dataset,
    plan: RunPlan,
    *,
    observe: Callable[[Record], object] = lambda record: None,
    progress: bool = False,
    place: devices.Devices = devices.Devices(),  # noqa: B008
) -> RunResult:
    """Trains on `dataset` within `plan` and writes no files.

    The run ends before a step past `plan.permitted_steps`. Its summary then says
    `stopped_by_budget`.

    Args:
        config: The run.
        dataset: Its data.
        plan: From `make_plan`, of this config.
        observe: Called with each record.
        progress: Whether to show a progress bar.
        place: The devices.
    """
    context = Context(place, Phases(), None, observe, progress)
    with context.phases("init"):
        run = resolve(config, plan, num_classes=dataset.num_classes)
    return _result(run, Course(*make_job(run, dataset, context), context), dataset.name)


def make_job(run: ResolvedRun, dataset: Dataset, context: Context) -> tuple[Job, State]:
    """Returns the job of a resolved config and its first state.

    Raises:
        ConfigError: A config that cannot be trained on these data.
    """
    config, plan, place, phases = run.config, run.plan, context.place, context.phases
    if config.record_training_metrics and not streaming.in_memory(dataset.train):
        raise ConfigError(
            "record_training_metrics=True reads the whole training split, which is streamed "
            "from files; leave it out"
        )
    with phases("init"):
        first = streaming.read(dataset.train, np.zeros(1, np.int64))["inputs"][0]
        variables = config.initial_variables(run.model, first, run.init_key)
        params, frozen = place.replicate(variables)
        if place.mesh is None:
            opt_state = run.chain.begin(params)
        else:
            opt_state = place.replicate(run.chain.optimizer.init(params))
    with phases("data"):
        resident = place.mesh is None and streaming.in_memory(dataset.train)
        splits: dict[str, Any] = {"test": dataset.test}
        if streaming.in_memory(dataset.test):
            splits["test"] = place.replicate(dataset.test)
        if resident or config.record_training_metrics:
            splits["train"] = place.replicate(dataset.train)
        users = None
        if config.records_per_user is not None:
            seed = seeds.of_records(plan.seed, config.generator)
            users = dataset.users(config.records_per_user, seed=seed)
        source = splits["train"] if resident else dataset.train
        feed = Feed(plan.sampler, source, place, resident=resident, users=users)
        hashed = ""
        if context.checkpoints is not None or jax.process_count() > 1:
            hashed = fingerprint(dataset, plan.seed, model=run.model, frozen=frozen)
        identity = resume.identify(run, hashed, place)
        resume.check_same_on_hosts(identity)
    evaluator = Evaluator(config, run.model, splits, frozen)

    def evaluate(params: Any, opt_state: Any) -> Record:
        params = averaged(params, opt_state)
        entry: Record = evaluator(params, "test")
        if config.record_training_metrics:
            entry["not_covered_by_epsilon"] = evaluator(params, "train")
        return entry

    job = Job(
        name=config.method.name,
        steps=plan.permitted_steps,
        frozen=frozen,
        feed=feed,
        compile=lambda example: compile_step(run.chain, run.model, example, place.mesh),
        evaluate=evaluate,
        bounds=plan.bounds,
        identity=identity,
        eval_every=config.eval_every,
        checkpoint_every=config.checkpoint_every,
    )
    return job, State(0, params, opt_state)


def _result(run: ResolvedRun, course: Course, dataset: str) -> RunResult:
    """Takes the run to its end and sums it up."""
    course.finish()
    state, phases = course.state, course.context.phases
    config = run.config
    final = averaged(state.params, state.opt_state)
    with phases("accounting"):
        promised = run.guarantee(state.opt_state)
    with phases("files"):
        sha256, versions = records.params_sha256(final), records.versions()
    newest = state.history[-1]
    summary = {
        **promised,
        "steps": course.last,
        "steps_requested": config.steps,
        "stopped_by_budget": course.last < config.steps,
        "dataset": dataset,
        "test_loss": newest["test_loss"],
        "test_accuracy": newest["test_accuracy"],
        **{name: newest[name] for name in ("test_perplexity",) if name in newest},
        "num_params": optax.tree.size(state.params),
        "params_sha256": sha256,
        "train_seconds": newest["seconds"],
        "compile_seconds": round(course.compile_seconds, 4),
        "first_step_seconds": phases.first_step and round(phases.first_step, 4),
        "phases": phases.seconds(),
        "config": config.to_dict(),
        "versions": versions,
    }
    return RunResult(summary, list(state.history), final)
