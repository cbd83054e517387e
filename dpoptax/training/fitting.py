"""Trains any loss, parameters and optimizer under a privacy plan."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.runs import (
    OtherRunError,
    RunIdentity,
    generator_of,
    key_of_words,
    seeded,
    settings,
    shared_key,
    words_of,
)
from dpoptax.training.data import streaming
from dpoptax.training.loss_arguments import takes_state
from dpoptax.training.run import inputs, records, seeds
from dpoptax.training.run.announcer import Announcer, say
from dpoptax.training.run.averaging import averaged
from dpoptax.training.run.context import Context, Log, Record, open_context
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.program import MICROBATCH_SIZE, RunProgram, bounds, noise_values
from dpoptax.training.run.resume import check_continues
from dpoptax.training.run.step import TrainingStep, with_fastest_microbatches
from dpoptax.training.run.training_loop import Job, State, TrainingLoop
from dpoptax.training.task import PlainPlan, Task
from dpoptax.users import UserTable

Generator = Literal["threefry", "chacha20"]


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


def fit(
    loss_fn: Callable[..., Any] | None,
    params: Any,
    data: streaming.Source,
    plan: dpoptax.PrivacyPlan | PlainPlan,
    *,
    optimizer: optax.GradientTransformation = optax.adam(1e-3),  # noqa: B008
    clip: dpoptax.Clip | float | None = None,
    grad_fn: Callable[..., Any] | None = None,
    frozen: Any = None,
    users: UserTable | None = None,
    has_aux: bool = False,
    microbatch_size: int | Literal["auto"] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
    generator: Generator | None = None,
    budget: float | None = None,
    evaluate: Callable[..., Mapping[str, Any] | None] | None = None,
    eval_every: int | None = None,
    log: Log = None,
    workdir: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> FitResult:
    """Trains parameters on private data under a privacy plan.

        x_{t+1} = x_t + optimizer((Σ_ξ clip(∇ℓ(x_t; ξ)) + σ C N(0, I)) / B),   t = 0, …, T − 1

    The result equals that of the loop in the README with `plan.new_run(key)` bit for bit. `fit`
    also prefetches batches, evaluates, logs, stops at a budget, and resumes an interrupted run.
    With `workdir`, the noise key is derived from `key`, the data, the initial parameters, the
    traced program and JAX's settings, so that no other run has the same noise.

    Privacy: `FitResult.guarantee` covers the parameters of all steps together and everything
    computed from them. It does not cover metrics that `evaluate` computes on private data. The
    noise key, `FitResult.opt_state`, `FitResult.run` and `workdir` are secret.

    Args:
      loss_fn: `loss_fn(params, example)`, the scalar loss of one example. If it requires a third
        argument, it gets a key that is new for each step and example. With `frozen`, it also gets
        the keyword `frozen`.
      params: a tree of arrays, which are copied. With a mesh, arrays that are sharded over it stay
        sharded, and so does the state of the optimizer. All others are replicated.
      data: a tree of columns with a row for each example: arrays, memory-mapped arrays, lists of
        examples, or sources with `len` and integer indices, such as those of `grain`. JAX arrays
        stay on their device. All others are prefetched in a thread.
      plan: its N must be the number of examples. Two calls with one plan are two independent runs.
        A `PlainPlan` trains a baseline without a guarantee.
      optimizer: any chain for the noisy mean gradient. Methods such as `dpoptax.disk()` come first
        in it. It must not add noise. The learning rate of the default often needs tuning.
      clip: as for `clipped_grad`; by default 1.0.
      grad_fn: a function from `clipped_grad`, or any other that returns a `ClippedSum`, for options
        that `fit` does not have:

            fit(None, params, data, plan, grad_fn=clipped_grad(loss_fn, 1.0, method="recompute"))

        `loss_fn` must then be None, and `has_aux` and `microbatch_size` be left out. `clip` is
        needed only if it is an `adaptive_clip`, and for correlated noise in fixed point. Give
        `clipped_grad` the same `mesh`, with automatic axes; the run then resumes on as many
        devices only. `fit` calls `grad_fn(points, batch, mask)`. If it requires a keyword `key`, it
        also gets `key` and `ids`, and with `frozen`, the keyword `frozen`. With `users`, the loss
        is that of `dpoptax.users.per_user_loss`. `grid` may be `plan.grid(clip)`.
      frozen: arrays that `loss_fn` uses and that are not trained, such as pretrained weights. They
        are an argument of the compiled step, and placed like `params`.
      users: the owners of the examples, if the plan's sampler is `users.sampler(…)`. The loss of a
        user is the mean loss of its examples.
      has_aux: whether `loss_fn` returns (loss, aux). Auxiliary outputs are private and discarded.
      microbatch_size: as for `clipped_grad`, or "auto" for the size that
        `dpoptax.tune_microbatch_size` finds before the first step, on a batch of zeros with a noise
        key of zeros. So the size depends on no private data. Equal steps in a process share it, and
        a resumed run keeps it. Other processes may find another size, which rounds differently.
      mesh: devices along an axis "data" that share each batch, on one or several hosts; None for
        one device. All hosts make the same call.
      key: the noise key, which also determines the batches, as for `PrivacyPlan.new_run`. By
        default, one from the operating system, which all hosts share.
      generator: that of a drawn key, as for `PrivacyPlan.new_run`. By default that of the run in
        `workdir`, or "threefry".
      budget: maximum ε at the plan's δ. A step that would exceed it is not taken.
      evaluate: `evaluate(params)` returns metrics by name, or None. If it requires a second
        argument, it also gets the state of `optimizer`, for example for an average of the
        parameters. That state does not hold the noise key. With `average_params` in the optimizer
        and one argument, it gets that average.
      eval_every: steps between evaluations; by default a tenth of the plan's. There is also one
        before the first step and one after the last.
      log: destination of a record for each evaluation, with step, ε, metrics and seconds: a list,
        the path of a file of JSON lines, or a function of one record. A resumed run logs earlier
        records again.
      workdir: folder for checkpoints, metrics.jsonl and, after the last step, statement.txt, the
        guarantee in plain language. If it holds a run, the same call resumes it
        with its key and parameters, and ends with the same parameters bit for bit. Another
        loss, optimizer, clip or data set raises an error, even if the run has finished. Parameters
        are saved before `evaluate` or a record shows them.
      checkpoint_every: steps between checkpoints. Evaluated steps also have one.
      progress: whether to show a progress bar with ε, if the run takes more than a second.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range, or conflicts with `grad_fn`; the data do not fit the
        plan or are not finite; one step exceeds the budget; `workdir` holds another run; or, with
        `workdir`, a step calls a host function, such as `jax.pure_callback`, whose changes could
        not be detected.
      OSError: a checkpoint cannot be written or read.

    >>> import dpoptax, jax.numpy as jnp, optax
    >>> data = jnp.arange(100.0) / 100
    >>> plan = dpoptax.PrivacyPlan(dataset_size=100, batch_size=50, steps=8, noise_multiplier=2)
    >>> loss_fn = lambda x, example: (x - example) ** 2
    >>> result = fit(loss_fn, jnp.zeros(()), data, plan, optimizer=optax.sgd(0.5), progress=False)
    >>> result.params.shape, result.steps, round(result.guarantee.stated_epsilon, 2)
    ((), 8, 3.54)
    """
    task = Task(
        loss_fn=loss_fn,
        params=params,
        data=data,
        plan=plan,
        optimizer=optimizer,
        clip=clip,
        grad_fn=grad_fn,
        frozen=frozen,
        users=users,
        has_aux=has_aux,
        microbatch_size=microbatch_size,
        budget=budget,
        evaluate=evaluate,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
    )
    del params, data
    return run_task(
        task, mesh=mesh, key=key, generator=generator, log=log, workdir=workdir, progress=progress
    )


def run_task(
    task: Task,
    *,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
    generator: Generator | None = None,
    log: Log = None,
    workdir: str | Path | None = None,
    progress: bool = True,
    finish: Callable[[FitResult, bool], object] = lambda result, given: None,
) -> FitResult:
    """Trains a task; see `fit`.

    `finish` gets the result, and whether this or an earlier start was given the noise key. It may
    write further files while the folder is locked.
    """
    _check_arguments(task, mesh)
    schedule, place = _make_schedule(task), inputs.devices_of(mesh)
    progress = progress and jax.process_index() == 0
    phases = Announcer(say if progress else None)
    with phases("data"):
        data = inputs.checked_data(task.data, task.plan, task.users, place)
    with phases("accounting"):
        steps = task.steps
    workdir = None if workdir is None else Path(workdir)
    exact = isinstance(task.plan, dpoptax.PrivacyPlan) and task.plan.fixed_point
    with open_context(
        workdir, place, phases, log=log, progress=progress, exact=exact, private=task.is_private
    ) as context:
        given = key is not None or (context.begun or {}).get("given", False)
        key = _new_or_continued(task.plan, key, generator, context.begun, workdir)
        with phases("init"):
            placed = {
                name: inputs.on_devices(name, getattr(task, name), place)
                for name in ("frozen", "params")
            }
            program = RunProgram(dataclasses.replace(task, data=data, **placed), place)
            step = program.step(key)
        if task.microbatch_size == "auto":
            step = _with_automatic_size(step, program, key, context)
        with phases("init"):
            first = State(0, program.task.params, program.first_state(key, program.task.params))
            # Only shapes are needed from now on, so a restored state can replace the arrays.
            program = dataclasses.replace(
                program, task=dataclasses.replace(program.task, params=None)
            )
        del placed
        job = make_job(program, key, step, steps, given=given, exact=exact, **schedule)
        with inputs.explains_optimizer(task.optimizer, first.params):
            loop = TrainingLoop(job, first, context)
            del first
            if loop.state.done > steps:
                _check_spent(task, loop.state)
            loop.finish()
        result = _make_result(task.plan, loop.state, workdir)
        finish(result, given)
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
    inputs.check_types(task.plan, task.optimizer)
    if task.grad_fn is not None:
        unused = {"has_aux": task.has_aux or None, "microbatch_size": task.microbatch_size}
        inputs.check_unused(loss_fn=task.loss_fn, **unused)
        inputs.check_automatic(mesh)
    inputs.check_microbatch_size(task.microbatch_size)
    if isinstance(task.plan, PlainPlan):
        inputs.check_plain(task.plan.noise is None, task.loss_fn, task.grad_fn, task.budget)


def _make_schedule(task: Task) -> dict[str, int]:
    """Returns the steps between evaluations and between checkpoints, by their names in `Job`."""
    eval_every = max(1, task.plan.steps // 10) if task.eval_every is None else task.eval_every
    schedule = {"eval_every": eval_every, "checkpoint_every": task.checkpoint_every}
    for name, every in schedule.items():
        if every < 1:
            raise ValueError(f"`{name}` must be at least 1, got {every}.")
    return schedule


def _with_automatic_size(
    step: TrainingStep, program: RunProgram, key: jax.Array, context: Context
) -> TrainingStep:
    """Returns the step with the micro-batch size of the run to resume, or with the fastest."""
    if context.begun is not None:  # repeated steps must not round differently
        size = context.begun["identity"]["values"].get(MICROBATCH_SIZE)
        return dataclasses.replace(step, microbatch_size=size)
    task = program.task
    feed = Feed(seeded(task.plan.sampler, key), task.data, program.place, users=task.users)
    with context.phases("tuning"), inputs.explains_optimizer(task.optimizer, task.params):
        state = task.params, program.first_state(jnp.zeros_like(key), task.params)
        args = state, *feed(0), task.frozen
        step = with_fastest_microbatches(step, args, program.place.mesh)
    context.phases.announce(f"microbatch_size={step.microbatch_size}")
    return step


def make_job(
    program: RunProgram,
    key: jax.Array,
    step: TrainingStep,
    steps: int,
    *,
    exact: bool,
    eval_every: int,
    checkpoint_every: int = 100,
    given: bool = False,
) -> Job:
    """Returns the job of a task, with everything that must be equal when it resumes.

    `given` is whether the key was given.
    """
    task = program.task
    plan = task.plan

    def begin(hashed: str, params: Any) -> Any:
        return program.first_state(seeds.noise_key_of(key, hashed), params)

    return Job(
        name="training",
        steps=steps,
        bounds=lambda at: bounds(plan, at),
        sampler=lambda opt_state: program.sampler(key, opt_state),
        step=step,
        frozen=task.frozen,
        data=task.data,
        users=task.users,
        evaluate=_metrics(task.evaluate),
        shown=_shown_to(task.evaluate),
        identity=lambda sampler, args: program.identity(key, step, sampler, args),
        kept={"key": np.frombuffer(words_of(key), np.uint32).tolist(), "given": given},
        begin=None if isinstance(plan, PlainPlan) else begin,
        exact=exact,
        eval_every=eval_every,
        checkpoint_every=checkpoint_every,
    )


def _make_result(
    plan: dpoptax.PrivacyPlan | PlainPlan, state: State, workdir: Path | None
) -> FitResult:
    """Returns the final state with its guarantee, which is also stated in the folder."""
    guarantee = None
    if not isinstance(plan, PlainPlan):
        run = plan.continue_run(state.opt_state)
        guarantee = dataclasses.replace(run.guarantee(state.opt_state), drawn=True)
    if workdir is not None and jax.process_index() == 0:
        (workdir / records.STATEMENT).unlink(missing_ok=True)  # there may be one of another run
        if guarantee is not None:
            records.write_text(workdir / records.STATEMENT, guarantee.statement())
    history = list(state.history)
    return FitResult(state.params, state.opt_state, guarantee, history, plan, state.done)


def _shown_to(evaluate: Callable[..., Any] | None) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Returns a function from parameters and state of the chain to the arguments of `evaluate`."""
    if evaluate is not None and takes_state(evaluate):
        return lambda params, opt_state: (params, opt_state[-1])  # not the noise, with its key
    return lambda params, opt_state: (averaged(params, opt_state),)


def _metrics(
    evaluate: Callable[..., Mapping[str, Any] | None] | None,
) -> Callable[[tuple[Any, ...]], Record]:
    """Returns a function that computes the metrics of a record as JSON values."""
    if evaluate is None:
        return lambda _: {}

    def metrics(shown: tuple[Any, ...]) -> Record:
        found = evaluate(*shown)
        if found is not None and not isinstance(found, Mapping):
            raise TypeError(f"`evaluate` must return a mapping of metrics or None, got {found!r}.")
        found = {str(name): np.asarray(value).tolist() for name, value in (found or {}).items()}
        if taken := found.keys() & {"step", "epsilon", "seconds"}:
            raise ValueError(
                f"`evaluate` must not return {sorted(taken)}, which are fields of every record. "
                "Rename these metrics."
            )
        return found

    return metrics


def _new_or_continued(
    plan: dpoptax.PrivacyPlan | PlainPlan,
    key: jax.Array | None,
    generator: Generator | None,
    begun: Record | None,
    workdir: Path | None,
) -> jax.Array:
    """Returns the noise key: given, new, or of the run to resume.

    Raises:
        OtherRunError: The plan, the key or JAX's settings belong to another run.
    """
    if begun is None:
        return shared_key(generator or "threefry") if key is None else key
    kept = key_of_words(np.array(begun["key"], np.uint32))
    if key is None and generator not in (None, generator_of(kept)):
        raise OtherRunError(
            f"`generator` must be that of the run in {workdir}, got {generator!r}. Its noise comes "
            "from another one. Pass the original generator, or use another folder for a new run."
        )
    known = {**settings(), **noise_values(plan, kept if key is None else key)}
    assert workdir is not None
    check_continues(RunIdentity(known), begun, workdir, part=True)
    return kept
