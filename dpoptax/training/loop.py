"""The training loop, for private and non-private runs alike: steps, metrics, budget, summary."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import optax

from dpoptax.training.bars import SHORT, Bar
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.run import devices, outputs, recording, records, resume
from dpoptax.training.run.advancing import Record, State, Surroundings
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.chain import check_names
from dpoptax.training.run.checkpoints import CheckpointError, Checkpoints, Interim
from dpoptax.training.run.outputs import RunResult
from dpoptax.training.run.phases import Phases, say
from dpoptax.training.run.privacy import PrivacyPlan, make_plan
from dpoptax.training.run.resolved import resolve
from dpoptax.training.run.setup import Ready, set_up

_AHEAD = 0.25
"""Seconds of steps that are under way at once: each holds its batch, and none counts as done."""


def train_and_evaluate(
    config: TrainConfig, workdir: str | Path, *, progress: bool = True
) -> RunResult:
    """Train as `config` says and write the run to `workdir`, or go on with the run there.

    The files are metrics.jsonl (a line per evaluation, written as it happens), checkpoints/,
    summary.json, params.msgpack and training.png; with `config.record` also recording.npz and
    spectrum.png. A run that was stopped goes on from its last checkpoint when called again. It
    ends as it would have without the stop, bit for bit.

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
    with Checkpoints(Path(workdir) / "checkpoints", config.keep_checkpoints) as checkpoints:
        with phases("data"):
            dataset = config.data(progress=progress and main).load()
        return _train_in(
            config, dataset, Path(workdir), checkpoints, place, phases, progress and main
        )


def _train_in(
    config: TrainConfig,
    dataset: Dataset,
    workdir: Path,
    checkpoints: Checkpoints,
    place: devices.Devices,
    phases: Phases,
    progress: bool,
) -> RunResult:
    """Trains from what `workdir` holds, and writes the files of the run there."""
    main = jax.process_index() == 0
    with phases("checkpoints"):
        begun = checkpoints.newest_record()
    metrics_path = workdir / "metrics.jsonl"
    if begun is None and metrics_path.exists():
        raise CheckpointError(
            f"workdir={str(workdir)!r} holds the metrics of a run and no checkpoint of it. A "
            "fresh start would forget what was already released: give another workdir, or "
            "remove these files if they do not matter"
        )
    # A typing error is told before the noise is worked out, which may take long.
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
    if progress and config.epsilon is not None and plan.permitted_steps < config.steps:
        say(
            f"epsilon={config.epsilon:g} ends the run after {plan.permitted_steps} of "
            f"{config.steps} steps: with noise_multiplier={plan.noise_multiplier:g} one more "
            "would exceed it"
        )
    with outputs.metrics_file(metrics_path if main else None, shown) as observe:
        if config.fixed_point:
            observe = resume.as_shown(observe, earlier)
        around = Surroundings(place, phases, checkpoints, observe, progress, shown)
        ready = set_up(run, dataset, around)
        if main:  # not before: a start that is refused leaves what is stated of the run
            (workdir / "summary.json").unlink(missing_ok=True)
        result = _result(ready)
        # While no other process may train here: its parameters would lie beside this summary.
        return _written(result, workdir, phases) if main else result


def _written(result: RunResult, workdir: Path, phases: Phases) -> RunResult:
    """Writes what a finished run leaves, the summary last; the result with its times."""
    with phases("files"):
        outputs.write(result, workdir)
    summary = {**result.summary, "phases": phases.seconds()}
    seeded = result.summary["config"]["seed"] is not None  # which tells the noise
    records.write_json(workdir / "summary.json", summary, secret=seeded)
    return dataclasses.replace(result, summary=summary)


def train(
    config: TrainConfig,
    dataset: Dataset,
    plan: PrivacyPlan,
    *,
    observe: Callable[[Record], object] = lambda record: None,
    progress: bool = False,
    checkpoints: Checkpoints | Interim | None = None,
    place: devices.Devices = devices.Devices(),  # noqa: B008
    phases: Phases | None = None,
) -> RunResult:
    """Train on `dataset` within `plan`; `observe` gets each record, and nothing else is written.

    Steps past `plan.permitted_steps` are refused: the run ends before them, and its summary says
    `stopped_by_budget`. With `checkpoints`, it goes on from the newest and writes new ones; the
    first of `Checkpoints` is from before any step: no noise is drawn that a later start would not
    know of. `phases` gets the time of each part.
    """
    around = Surroundings(place, phases or Phases(), checkpoints, observe, progress)
    with around.phases("init"):
        run = resolve(config, plan, num_classes=dataset.num_classes)
    return _result(set_up(run, dataset, around))


def _advanced(ready: Ready) -> State:
    """Takes the run to its end."""
    course, state = ready.course, ready.state
    steps = range(state.done, course.run.plan.permitted_steps)
    with Bar(
        total=course.last,
        initial=state.done,
        desc=course.run.config.method.name,
        unit="step",
        bar_format=SHORT,
        leave=None,  # a bar below another one goes with its run
        disable=not course.around.progress,
    ) as bar:
        if not state.history:
            state = course.evaluated(state)
        bar.set_postfix_str(course.progress(state))
        pace = _Pace()
        for batch in streaming.prefetch(ready.feed, steps):
            state = course.advance(state, batch)
            pace.keep(state)
            with course.around.phases("telemetry"):
                bar.update()
            if course.evaluates(state.done):
                state = course.evaluated(state)
                with course.around.phases("telemetry"):
                    bar.set_postfix_str(course.progress(state))
            if course.saves(state.done):
                course.save(state, wait=state.done == course.last)
    return state


class _Pace:
    """Waits for the device once a while: without, dozens of steps are queued before one is done."""

    def __init__(self) -> None:
        self._steps, self._queued, self._since = 1, 0, time.monotonic()

    def keep(self, state: State) -> None:
        """Called after each step, with the state that it leads to."""
        self._queued += 1
        if self._queued < self._steps:
            return
        jax.block_until_ready(state.params)
        now = time.monotonic()
        each = max(now - self._since, 1e-6) / self._queued
        self._steps, self._queued, self._since = max(1, int(_AHEAD / each)), 0, now


def _result(ready: Ready) -> RunResult:
    """Takes the run to its end and sums it up."""
    state, course = _advanced(ready), ready.course
    run = course.run
    config, phases = run.config, course.around.phases
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
        "dataset": ready.dataset,
        "test_loss": newest["test_loss"],
        "test_accuracy": newest["test_accuracy"],
        **{name: newest[name] for name in ("test_perplexity",) if name in newest},
        "num_params": optax.tree.size(state.params),
        "params_sha256": sha256,
        "train_seconds": newest["seconds"],
        "compile_seconds": round(ready.compile_seconds, 4),
        "first_step_seconds": phases.first_step and round(phases.first_step, 4),
        "phases": phases.seconds(),
        "config": config.to_dict(),
        "versions": versions,
    }
    recorded = recording.recorded(state.opt_state)
    history = list(state.history)
    return RunResult(summary, history, final, recorded, run.chain.stddev)
