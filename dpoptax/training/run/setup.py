"""A run before its first step: model built, state restored, programs compiled."""

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import devices, resume
from dpoptax.training.run.advancing import Course, State, Surroundings
from dpoptax.training.run.evaluation import Evaluation, evaluated_steps
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.resolved import Run
from dpoptax.training.run.step import compile_step


@dataclasses.dataclass(frozen=True)
class Ready:
    """A run of which all is compiled, before the first step or the first after a checkpoint.

    Attributes:
        course: What is the same at each step.
        state: Where the run stands.
        feed: The batches.
        dataset: The data set's name.
        compile_seconds: How long compiling took.
    """

    course: Course
    state: State
    feed: Feed
    dataset: str
    compile_seconds: float


def set_up(run: Run, dataset: Dataset, around: Surroundings) -> Ready:
    """Builds, restores and compiles; a run that begins is saved before any step.

    Raises:
        ConfigError: A config that cannot be trained on these data.
    """
    config, phases = run.config, around.phases
    if config.record_training_metrics and not streaming.in_memory(dataset.train):
        raise ConfigError(
            "record_training_metrics=True reads the whole training split, which is streamed from "
            "files; leave it out"
        )
    with phases("init"):
        state, frozen = _begun(run, dataset, around.place)
    with phases("data"):
        feed = Feed(run, dataset, around.place)
        fingerprint = ""  # of what no checkpoint is made
        if around.checkpoints is not None or jax.process_count() > 1:
            fingerprint = resume.fingerprint(run, dataset, frozen)
            resume.check_same_on_hosts(run, fingerprint, around.place)
    with phases("checkpoints"):
        state, restored = _restored(run, state, fingerprint, around)
    compiling = time.perf_counter()
    course = _compiled(run, feed, state, frozen, fingerprint, around)
    compile_seconds = time.perf_counter() - compiling
    if not restored:
        course.save(state, wait=True)
    return Ready(course, state, feed, dataset.name, compile_seconds)


def _begun(run: Run, dataset: Dataset, place: devices.Devices) -> tuple[State, Any]:
    """The state before any step, and what the model computes with and does not train."""
    example = jax.tree.map(lambda x: x[0], streaming.read(dataset.train, np.zeros(1, np.int64)))
    variables = run.config.initial_variables(run.model, example["inputs"], run.init_key)
    params, frozen = place.replicate(variables)
    return State(0, params, _first_state(run, params, place)), frozen


def _first_state(run: Run, params: Any, place: devices.Devices) -> Any:
    if place.mesh is None:
        return run.chain.begin(params)
    return place.replicate(run.chain.optimizer.init(params))


def _restored(run: Run, state: State, fingerprint: str, around: Surroundings) -> tuple[State, bool]:
    """The newest checkpoint's state, its records observed again, or `state`; and which it is."""
    begun = None
    if around.checkpoints is not None:
        begun = around.checkpoints.restore((state.params, state.opt_state))
    if begun is None:
        return state, False
    (params, opt_state), saved = begun
    resume.check_ledger(saved, opt_state)
    resume.check_same_data(saved, fingerprint)
    # Of what was restored: where the newest checkpoint is damaged it is an older one.
    resume.check_same_sums(run, saved, around.place, around.shown)
    resume.check_end(run, saved, around.shown)
    for entry in saved["history"]:
        around.observe(entry)
    return State(saved["step"], params, opt_state, tuple(saved["history"])), True


def _compiled(
    run: Run,
    feed: Feed,
    state: State,
    frozen: Any,
    fingerprint: str,
    around: Surroundings,
) -> Course:
    """What takes the run from `state` to its end, with programs for its shapes."""
    place, phases = around.place, around.phases
    last = max(state.done, run.plan.permitted_steps)
    evaluate = Evaluation(run.config, run.model, feed.splits, frozen)
    with phases("compile"):
        if place.mesh is None:
            evaluate.compile(state.params, "test")
        arrays = state.params, state.opt_state
        step = compile_step(run.chain, run.model, (arrays, *feed(0), frozen), place.mesh)
    with phases("telemetry"):
        bounds = run.plan.bounds(evaluated_steps(run.config, last))
    if place.mesh is not None:
        with phases("evaluation"):
            evaluate(state.params, "test")  # compiles
    spent = state.history[-1]["seconds"] if state.history else 0.0
    return Course(
        run=run,
        last=last,
        bounds=bounds,
        step=step,
        frozen=frozen,
        evaluate=evaluate,
        began=time.perf_counter() - spent,
        around=around,
        fingerprint=fingerprint,
    )
