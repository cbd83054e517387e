"""The training loop, for private and non-private runs alike: steps, metrics, budget, summary."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset, load_dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.models import models
from dpoptax.training.run import devices, outputs, recording, records, resume
from dpoptax.training.run.advancing import (
    Course,
    Record,
    State,
    Surroundings,
    progress_text,
)
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.chain import build_chain
from dpoptax.training.run.checkpoints import CheckpointError, Checkpoints
from dpoptax.training.run.evaluation import Evaluation, evaluated_steps
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.foresight import preparing, published_shapes, shapes_of
from dpoptax.training.run.generation import Generation
from dpoptax.training.run.phases import Phases, say
from dpoptax.training.run.privacy import PrivacyPlan, guarantee, make_plan
from dpoptax.training.run.step import compile_step


@dataclasses.dataclass(frozen=True)
class RunResult:
    """A finished run.

    Attributes:
        summary: What summary.json holds.
        history: The records of metrics.jsonl; the first is from before any step.
        params: The final parameters, or their average if the config asks for one.
        recorded: Coordinates of the released and of the filtered gradients, (steps, coordinates)
            each, if the config asks for a record.
        generated: Each source of the test split with the text that was generated for it and its
            references, if the config asks for beams.
        noise_stddev: Standard deviation of the noise in each coordinate of a release; 0 if not
            private, NaN where there is no one number.
    """

    summary: Record
    history: list[Record]
    params: Any
    recorded: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    generated: list[Record] = dataclasses.field(default_factory=list)
    noise_stddev: float = 0.0


def train_and_evaluate(
    config: TrainConfig, workdir: str | Path, *, progress: bool = True
) -> RunResult:
    """Train as `config` says and write the run to `workdir`, or go on with the run there.

    The files are metrics.jsonl (a line per evaluation, written as it happens), checkpoints/,
    summary.json, params.msgpack and training.png; with `config.record` also recording.npz and
    spectrum.png, with `config.beams` generated.jsonl. A run that was stopped, by whatever, goes on
    from its last checkpoint when called again, and ends as it would have without the stop, bit for
    bit.

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
        phases.hush()
    shapes = published_shapes(config) if place.mesh is None else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(preparing(config, shapes, phases))
        with phases("data"):
            dataset = load_dataset(config.dataset, config.data_dir, config.tokens)
            if place.mesh is None and shapes != (shapes := shapes_of(dataset)):
                stack.enter_context(preparing(config, shapes, phases))
        result = _train_in(config, dataset, Path(workdir), place, phases, progress and main)
    if main:
        with phases("files"):
            outputs.write(result, Path(workdir))
        spent = {"phases": phases.seconds(), "phases_aside": phases.seconds_aside()}
        summary = {**result.summary, **spent}
        result = dataclasses.replace(result, summary=summary)
        records.write_json(Path(workdir) / "summary.json", summary)
    return result


def _train_in(
    config: TrainConfig,
    dataset: Dataset,
    workdir: Path,
    place: devices.Devices,
    phases: Phases,
    progress: bool,
) -> RunResult:
    """Trains from what `workdir` holds, and writes metrics and checkpoints there."""
    main = jax.process_index() == 0
    with Checkpoints(workdir / "checkpoints", config.keep_checkpoints) as checkpoints:
        with phases("checkpoints"):
            begun = checkpoints.newest_record()
        metrics_path = workdir / "metrics.jsonl"
        if begun is None and metrics_path.exists():
            raise CheckpointError(
                f"workdir={str(workdir)!r} holds the metrics of a run and no checkpoint of it. A "
                "fresh start would forget what was already released: give another workdir, or "
                "remove these files if they do not matter"
            )
        with phases("accounting"):
            plan = make_plan(resume.with_seed_of(config, begun), dataset.train_size)
            if begun is not None:
                resume.check_same_run(config, plan, begun, workdir)
        if main:
            (workdir / "summary.json").unlink(missing_ok=True)
        with outputs.metrics_file(metrics_path if main else None) as observe:
            return train(
                config,
                dataset,
                plan,
                observe=observe,
                progress=progress,
                checkpoints=checkpoints,
                place=place,
                phases=phases,
            )


def train(
    config: TrainConfig,
    dataset: Dataset,
    plan: PrivacyPlan,
    *,
    observe: Callable[[Record], object] = lambda record: None,
    progress: bool = False,
    checkpoints: Checkpoints | None = None,
    place: devices.Devices = devices.Devices(),  # noqa: B008
    phases: Phases | None = None,
) -> RunResult:
    """Train on `dataset` within `plan`; `observe` gets each record, and nothing else is written.

    Steps past `plan.permitted_steps` are refused: the run ends before them, and its summary says
    `stopped_by_budget`. With `checkpoints`, it goes on from the newest and writes new ones, the
    first before any step: no noise is drawn that a later start would not know of. `phases` gets
    the time of each part.
    """
    around = Surroundings(place, phases or Phases(), checkpoints, observe, progress)
    ready = _set_up(config, dataset, plan, around)
    return _result(ready, _run(ready))


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A run of which all is compiled, before its first step or the first after a checkpoint.

    Attributes:
        course: What is the same at each step.
        state: Where the run stands.
        feed: The batches.
        generate: What generates texts at the end; None: nothing does.
        dataset: The data set's name.
        stddev: Of the noise in each coordinate of a release.
        compile_seconds: How long compiling took.
    """

    course: Course
    state: State
    feed: Feed
    generate: Generation | None
    dataset: str
    stddev: float
    compile_seconds: float


def _set_up(
    config: TrainConfig, dataset: Dataset, plan: PrivacyPlan, around: Surroundings
) -> _Ready:
    """Builds, restores and compiles; a run that begins is saved before any step."""
    if config.record_training_metrics and not streaming.in_memory(dataset.train):
        raise ConfigError(
            "record_training_metrics=True reads the whole training split, which is streamed from "
            "files; leave it out"
        )
    place, phases = around.place, around.phases
    with phases("init"):
        init_key, noise_key = jax.random.split(jax.random.key(plan.sampler.seed))
        model = models.build_model(config, dataset.num_classes, dataset.kind)
        generate = Generation(config, model, dataset) if config.beams else None
        chain = build_chain(config, plan.noise_multiplier, noise_key)
        example = jax.tree.map(lambda x: x[0], streaming.read(dataset.train, np.zeros(1, np.int64)))
        params, frozen = place.replicate(
            models.start_variables(config, model, example["inputs"], init_key)
        )
        state = State(0, params, place.replicate(chain.optimizer.init(params)))
    with phases("data"):
        feed = Feed(dataset, plan, place, config)
    with phases("checkpoints"):
        state, restored = _restored(state, around)
    last = max(state.done, plan.permitted_steps)

    compiling = time.perf_counter()
    evaluate = Evaluation(config, model, feed.splits, frozen)
    with phases("compile"):
        if place.mesh is None:
            evaluate.compile(state.params, "test")
        arguments = (state.params, state.opt_state, *feed(0), frozen)
        step = compile_step(chain, model, arguments, place.mesh)
    with phases("telemetry"):
        bounds = plan.bounds(evaluated_steps(config, last))
    if place.mesh is not None:
        with phases("evaluation"):
            evaluate(state.params, "test")  # compiles
    compiled = time.perf_counter()
    course = Course(
        config=config,
        plan=plan,
        last=last,
        bounds=bounds,
        step=step,
        frozen=frozen,
        evaluate=evaluate,
        began=compiled - (state.history[-1]["seconds"] if state.history else 0.0),
        around=around,
    )
    if not restored:
        course.save(state, wait=True)
    return _Ready(course, state, feed, generate, dataset.name, chain.stddev, compiled - compiling)


def _restored(state: State, around: Surroundings) -> tuple[State, bool]:
    """The newest checkpoint's state, its records observed again, or `state`; and which it is."""
    begun = None
    if around.checkpoints is not None:
        begun = around.checkpoints.restore((state.params, state.opt_state))
    if begun is None:
        return state, False
    (params, opt_state), saved = begun
    resume.check_ledger(saved, opt_state)
    for entry in saved["history"]:
        around.observe(entry)
    return State(saved["step"], params, opt_state, tuple(saved["history"])), True


def _run(ready: _Ready) -> State:
    """The state at the end of a run."""
    course, state = ready.course, ready.state
    steps = range(state.done, course.plan.permitted_steps)
    with tqdm(
        total=course.last,
        initial=state.done,
        desc=course.config.method.name,
        unit="step",
        disable=not course.around.progress,
    ) as bar:
        if not state.history:
            state = course.evaluated(state)
            bar.set_postfix_str(progress_text(state.history[-1]))
        for batch in streaming.prefetch(ready.feed, steps):
            state = course.advance(state, batch)
            with course.around.phases("telemetry"):
                bar.update()
            if course.evaluates(state.done):
                state = course.evaluated(state)
                with course.around.phases("telemetry"):
                    bar.set_postfix_str(progress_text(state.history[-1]))
            if course.saves(state.done):
                course.save(state, wait=state.done == course.last)
    return state


def _result(ready: _Ready, state: State) -> RunResult:
    """What a run has come to in its last state."""
    course = ready.course
    config, plan, phases = course.config, course.plan, course.around.phases
    final = averaged(state.params, state.opt_state)
    scored: Record = {}
    generated: list[Record] = []
    with phases("generation"):
        if ready.generate is not None:
            scored, generated = ready.generate(
                final, course.frozen, progress=course.around.progress
            )
    with phases("accounting"):
        promised = guarantee(config, plan, state.opt_state)
    with phases("files"):
        sha256, versions = records.params_sha256(final), records.versions()
    newest = state.history[-1]
    summary = {
        **promised,
        "steps": course.last,
        "steps_requested": config.steps,
        "stopped_by_budget": course.last < config.steps,
        "dataset": ready.dataset,
        "test_loss": newest["test_loss"],
        "test_accuracy": newest["test_accuracy"],
        **{name: newest[name] for name in ("test_perplexity",) if name in newest},
        **scored,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "params_sha256": sha256,
        "train_seconds": newest["seconds"],
        "compile_seconds": round(ready.compile_seconds, 4),
        "first_step_seconds": phases.first_step and round(phases.first_step, 4),
        "phases": phases.seconds(),
        "config": config.to_dict(),
        "versions": versions,
    }
    recorded = recording.recorded(state.opt_state)
    return RunResult(summary, list(state.history), final, recorded, generated, ready.stddev)
