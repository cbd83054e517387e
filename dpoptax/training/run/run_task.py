"""Trains a task: checks it, makes or resumes its run, and states the result."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.runs import (
    Generator,
    OtherRunError,
    RunIdentity,
    generator_of,
    key_of_words,
    settings,
    shared_key,
)
from dpoptax.training.run import arguments, files
from dpoptax.training.run.announcer import Announcer, say
from dpoptax.training.run.context import Log, Record, open_context
from dpoptax.training.run.program import RunProgram, noise_values
from dpoptax.training.run.resume import check_continues
from dpoptax.training.run.training_loop import State, TrainingLoop
from dpoptax.training.task import PlainPlan, Task


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Result of `fit`.

    Attributes:
      params: the final parameters. They may be published under `guarantee`.
      opt_state: the final state of the noise and the optimizer. Secret: it holds the noise key.
      guarantee: the guarantee of the steps taken; `print(guarantee)` states it. None under a
        `PlainPlan`.
      history: the logged records of all evaluations.
      plan: the plan of the run.
      steps: number of steps taken. It is below the plan's if the budget ended the run.
    """

    params: Any = dataclasses.field(repr=False)
    opt_state: Any = dataclasses.field(repr=False)
    guarantee: Guarantee | None = dataclasses.field(repr=False)
    history: list[Record] = dataclasses.field(repr=False)
    plan: dpoptax.PrivacyPlan | PlainPlan = dataclasses.field(repr=False)
    steps: int

    @property
    def run(self) -> dpoptax.PrivateRun:
        """The run after its steps, under a `PrivacyPlan`. Secret."""
        assert not isinstance(self.plan, PlainPlan)
        return self.plan.continue_run(self.opt_state)


def run_task(
    task: Task,
    *,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
    generator: Generator | None = None,
    log: Log = None,
    workdir: str | Path | None = None,
    progress: bool = True,
    on_result: Callable[[FitResult, bool], object] = lambda result, key_was_given: None,
) -> FitResult:
    """Trains a task; see `fit`.

    `on_result` gets the result, and whether this or an earlier start was given the noise key. It
    may write further files while the folder is locked.
    """
    _check_arguments(task, mesh)
    mesh = arguments.automatic(mesh)
    progress = progress and jax.process_index() == 0
    phases = Announcer(say if progress else None)
    with phases("loading data"):
        data = arguments.checked_data(task.data, task.plan, task.users, mesh)
    with phases("computing noise and ε"):
        steps = task.steps
    workdir = None if workdir is None else Path(workdir)
    with open_context(workdir, phases, log=log, progress=progress) as context:
        key_was_given = key is not None or (context.run_record or {}).get("given", False)
        key = _new_or_continued(task.plan, key, generator, context.run_record, workdir)
        with phases("initializing parameters and optimizer"):
            placed = {
                name: arguments.on_devices(name, getattr(task, name), mesh)
                for name in ("frozen", "params")
            }
            program = RunProgram(dataclasses.replace(task, data=data, **placed), mesh, key)
            first = State(0, program.task.params, program.first_state(program.task.params))
            # Only shapes are needed from now on, so a restored state can replace the arrays.
            shapes = arguments.shapes_of(program.task.params)
            program = dataclasses.replace(
                program, task=dataclasses.replace(program.task, params=shapes)
            )
        del placed
        loop = TrainingLoop(program, first, context, steps=steps, key_was_given=key_was_given)
        del first
        if loop.state.done > steps:
            _check_spent(task, loop.state)
        loop.take_remaining_steps()
        result = _make_result(task.plan, loop.state, workdir)
        on_result(result, key_was_given)
    return result


def _check_spent(task: Task, state: State) -> None:
    """Raises if a run that is resumed has spent more than the budget."""
    if task.budget is None or isinstance(task.plan, PlainPlan):
        return
    spent = task.plan.continue_run(state.opt_state).guarantee(state.opt_state).stated_epsilon
    if spent > task.budget:
        raise ValueError(
            f"`budget` must be at least {spent:.4g}, which the run has spent in {state.done:,} "
            f"steps, got {task.budget}."
        )


def _check_arguments(task: Task, mesh: jax.sharding.Mesh | None) -> None:
    """Raises if an argument has the wrong type, or conflicts with another one."""
    arguments.check_types(task.plan, task.optimizer)
    for name, every in {
        "eval_every": task.evaluation_interval,
        "checkpoint_every": task.checkpoint_every,
    }.items():
        if every < 1:
            raise ValueError(f"`{name}` must be at least 1, got {every}.")
    if task.evaluate is not None:
        arguments.required("evaluate", task.evaluate)  # raises if it is not a function
    if task.grad_fn is not None:
        arguments.check_unused(loss_fn=task.loss_fn, microbatch_size=task.microbatch_size)
        arguments.check_automatic(mesh)
    if isinstance(task.plan, PlainPlan):
        arguments.check_plain(task.plan.noise is None, task.loss_fn, task.grad_fn, task.budget)


def _make_result(
    plan: dpoptax.PrivacyPlan | PlainPlan, state: State, workdir: Path | None
) -> FitResult:
    """Returns the final state with its guarantee, which is also stated in the folder."""
    guarantee = None
    if not isinstance(plan, PlainPlan):
        run = plan.continue_run(state.opt_state)
        guarantee = dataclasses.replace(run.guarantee(state.opt_state), drawn=True)
    if workdir is not None and jax.process_index() == 0:
        (workdir / files.STATEMENT).unlink(missing_ok=True)  # there may be one of another run
        if guarantee is not None:
            files.write_text(workdir / files.STATEMENT, guarantee.statement())
    history = list(state.history)
    return FitResult(state.params, state.opt_state, guarantee, history, plan, state.done)


def _new_or_continued(
    plan: dpoptax.PrivacyPlan | PlainPlan,
    key: jax.Array | None,
    generator: Generator | None,
    run_record: Record | None,
    workdir: Path | None,
) -> jax.Array:
    """Returns the noise key: given, new, or of the run to resume.

    Raises:
        OtherRunError: The plan, the key or JAX's settings belong to another run.
    """
    if run_record is None:
        return shared_key(generator or "threefry") if key is None else key
    kept = key_of_words(np.array(run_record["key"], np.uint32))
    if key is None and generator not in (None, generator_of(kept)):
        raise OtherRunError(
            f"`generator` must be that of the run in {workdir}, got {generator!r}. Its noise comes "
            "from another one. Pass the original generator, or use another folder for a new run."
        )
    known = {**settings(), **noise_values(plan, kept if key is None else key)}
    assert workdir is not None
    check_continues(RunIdentity(known), run_record, workdir, part=True)
    return kept
