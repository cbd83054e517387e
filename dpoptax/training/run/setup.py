"""Runs before the first step: model built, states restored, programs compiled."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.models import models
from dpoptax.training.run import devices, kept, resume
from dpoptax.training.run.advancing import Course, State, States, Surroundings
from dpoptax.training.run.evaluation import Evaluation, evaluated_steps
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.generation import Generation
from dpoptax.training.run.kept import Confirmation
from dpoptax.training.run.privacy import check_budget
from dpoptax.training.run.resolved import Run
from dpoptax.training.run.step import compile_steps
from dpoptax.training.run.together import check_alike


@dataclasses.dataclass(frozen=True)
class Ready:
    """Runs of which all is compiled, before the first step or the first after a checkpoint.

    Attributes:
        course: What is the same at each step.
        states: Where the runs stand.
        feed: The batches.
        generate: What generates texts at the end; None: nothing does.
        dataset: The data set's name.
        compile_seconds: How long compiling took.
    """

    course: Course
    states: States
    feed: Feed
    generate: Generation | None
    dataset: str
    compile_seconds: float

    @property
    def memory(self) -> int:
        """Bytes that a step takes, those of the states and of the data on the device included."""
        steps: Any = self.course.steps
        sizes = steps.memory_analysis()
        whole = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
        return int(whole - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes)


def set_up(runs: tuple[Run, ...], dataset: Dataset, around: Surroundings) -> Ready:
    """Builds, restores and compiles; a run that begins is saved before any step.

    Args:
        runs: One run; or several that have all but the learning rate in common, on one device and
            without checkpoints, which then advance together.
        dataset: What they are trained on.
        around: Where.

    Raises:
        ConfigError: A config that cannot be trained on these data.
        ValueError: Several runs that cannot advance together.
    """
    run = runs[0]
    config, phases = run.config, around.phases
    alone = around.checkpoints is not None or around.place.mesh is not None
    if len(runs) > 1 and (alone or not all(map(run.at_another_rate, runs))):
        raise ValueError(
            "runs advance together on one device, without checkpoints, and where they differ in "
            "the learning rate alone; train these one by one"
        )
    if config.record_training_metrics and not streaming.in_memory(dataset.train):
        raise ConfigError(
            "record_training_metrics=True reads the whole training split, which is streamed from "
            "files; leave it out"
        )
    with phases("init"):
        generate = Generation(config, run.model, dataset) if config.beams else None
        states, frozen = _begun(runs, dataset, around.place)
    with phases("data"):
        feed = Feed(run, dataset, around.place)
        fingerprint = ""  # of what no checkpoint is made
        if around.checkpoints is not None or jax.process_count() > 1:
            fingerprint = resume.fingerprint(run, dataset, frozen)
            resume.check_same_on_hosts(run, fingerprint, around.place)
    with phases("checkpoints"):
        states, restored = _restored(run, states, fingerprint, around)
    compiling = time.perf_counter()
    course = _compiled(runs, feed, states, frozen, fingerprint, around)
    compile_seconds = time.perf_counter() - compiling
    if not restored:
        course.save(states, wait=True)
    return Ready(course, states, feed, generate, dataset.name, compile_seconds)


def _begun(runs: tuple[Run, ...], dataset: Dataset, place: devices.Devices) -> tuple[States, Any]:
    """States before any step, and what the model computes with and does not train."""
    run = runs[0]
    example = jax.tree.map(lambda x: x[0], streaming.read(dataset.train, np.zeros(1, np.int64)))
    variables = models.start_variables(run.config, run.model, example["inputs"], run.init_key)
    params, frozen = place.replicate(variables)
    # Copies: the steps donate the arrays of all runs, and no buffer can be given away twice.
    own = [params, *(jax.tree.map(jnp.copy, params) for _ in runs[1:])]
    states = tuple(
        State(0, params, _first_state(run, params, place))
        for run, params in zip(runs, own, strict=True)
    )
    check_alike([(state.params, state.opt_state) for state in states])
    return states, frozen


def _first_state(run: Run, params: Any, place: devices.Devices) -> Any:
    if place.mesh is None:
        return run.chain.begin(params)
    return place.replicate(run.chain.optimizer.init(params))


def _restored(
    run: Run, states: States, fingerprint: str, around: Surroundings
) -> tuple[States, bool]:
    """The newest checkpoint's state, its records observed again, or `states`; and which it is."""
    begun = None
    if around.checkpoints is not None:
        (state,) = states
        begun = around.checkpoints.restore((state.params, state.opt_state))
    if begun is None:
        return states, False
    (params, opt_state), saved = begun
    resume.check_ledger(saved, opt_state)
    resume.check_same_data(saved, fingerprint)
    # Of what was restored: where the newest checkpoint is damaged it is an older one.
    resume.check_same_sums(run, saved, around.place, around.shown)
    resume.check_end(run, saved, around.shown)
    for entry in saved["history"]:
        around.observe(entry)
    return (State(saved["step"], params, opt_state, tuple(saved["history"])),), True


def _compiled(
    runs: tuple[Run, ...],
    feed: Feed,
    states: States,
    frozen: Any,
    fingerprint: str,
    around: Surroundings,
) -> Course:
    """What takes the runs from `states` to their end, with programs for their shapes."""
    place, phases, run = around.place, around.phases, runs[0]
    last = max(states[0].done, run.plan.permitted_steps)
    params = tuple(state.params for state in states)
    evaluate = Evaluation(run.config, run.model, feed.splits, frozen)
    with phases("compile"):
        if place.mesh is None:
            evaluate.compile(params, "test")
        arrays = tuple((state.params, state.opt_state) for state in states)
        steps = compile_steps(run.chain, run.model, (arrays, *feed(0), frozen), place.mesh)
    with phases("telemetry"):
        bounds = run.plan.bounds(evaluated_steps(run.config, last))
    if place.mesh is not None:
        with phases("evaluation"):
            evaluate(params, "test")  # compiles
    # The accounting, asked again where an earlier start may have answered.
    confirmation = Confirmation(lambda: check_budget(run.config, run.plan, bounds[last]))
    history = states[0].history
    spent = history[-1]["seconds"] if history else 0.0
    return Course(
        runs=runs,
        last=last,
        bounds=bounds,
        steps=steps,
        frozen=frozen,
        evaluate=evaluate,
        began=time.perf_counter() - spent,
        around=around,
        fingerprint=fingerprint,
        confirmation=confirmation if kept.in_use() else None,
    )
