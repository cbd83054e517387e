"""Trains any loss, parameters and optimizer under a privacy plan."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.training.data import streaming
from dpoptax.training.data.augmentations import step_keys
from dpoptax.training.run import continuing, inputs, outputs, resume, seeds
from dpoptax.training.run.checkpoints import Checkpoints
from dpoptax.training.run.course import Context, Course, Job, Record, State
from dpoptax.training.run.feeding import Feed
from dpoptax.training.run.phases import PATIENCE, Phases, say
from dpoptax.training.run.step import lower_step, make_step, private_gradient
from dpoptax.users import UserTable, per_user_loss

Log = list[Record] | str | Path | Callable[[Record], object] | None
"""Destination of records: a list, a file of JSON lines, or a function."""


@dataclasses.dataclass(frozen=True)
class FitResult:
    """Result of `fit`.

    Attributes:
      params: the final parameters. They may be published under `guarantee`.
      opt_state: the final state of the noise and the optimizer. Secret: it holds the noise key.
      guarantee: of the steps that were taken; `print(guarantee)` states it.
      history: the records of all evaluations, as they were logged.
      plan: the plan, with the sampler that drew the batches.
    """

    params: Any = dataclasses.field(repr=False)
    opt_state: Any = dataclasses.field(repr=False)
    guarantee: Guarantee = dataclasses.field(repr=False)
    history: list[Record] = dataclasses.field(repr=False)
    plan: dpoptax.PrivacyPlan

    @property
    def steps(self) -> int:
        """Number of steps that were taken, fewer than the plan's if the budget ended the run."""
        return self.guarantee.releases[0].number


def fit(
    loss_fn: Callable[..., Any],
    params: Any,
    data: streaming.Source,
    plan: dpoptax.PrivacyPlan,
    *,
    optimizer: optax.GradientTransformation = optax.adam(1e-3),  # noqa: B008
    clip: dpoptax.Clip | float = 1.0,
    frozen: Any = None,
    users: UserTable | None = None,
    has_aux: bool = False,
    microbatch_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
    fixed_point: bool = False,
    budget: float | None = None,
    evaluate: Callable[[Any], Mapping[str, Any] | None] | None = None,
    eval_every: int | None = None,
    log: Log = None,
    workdir: str | Path | None = None,
    checkpoint_every: int = 100,
    progress: bool = True,
) -> FitResult:
    """Trains parameters on private data, as a privacy plan says.

        x_{t+1} = x_t + optimizer((Σ_ξ clip(∇ℓ(x_t; ξ)) + σ C N(0, I)) / B),   t = 0, …, T − 1

    It does the same as the loop in the README, with the same parameters bit for bit: `plan` draws
    the batches and adds the noise, `clipped_grad` clips. In addition it reads batches ahead,
    evaluates, logs, stops at a budget, and goes on with a run that was stopped.

    Privacy: the parameters of all steps together have `FitResult.guarantee`, and so has everything
    computed from them. Metrics that `evaluate` computes on private data are not covered. The noise
    key and the sampler's seed are secret, and so are `FitResult.opt_state` and `workdir`.

    Args:
      loss_fn: `loss_fn(params, example)`, the scalar loss of one example. If it requires a third
        argument, this is a key, a new one for each step and example. With `frozen`, it also gets
        the keyword `frozen`.
      params: a tree of arrays. They are copied, and replicated on the devices of a mesh.
      data: a tree of columns with a row for each example: arrays, memory-mapped arrays, lists of
        examples, or sources with `len` and integer indices, such as those of `grain`. An array of
        JAX stays where it is; all others are read ahead of the steps, on a thread.
      plan: its N must be the number of examples.
      optimizer: any chain for the noisy mean gradient. Methods such as `dpoptax.disk()` come first
        in it. It must not add noise.
      clip: as for `clipped_grad`.
      frozen: arrays that `loss_fn` computes with and that are not trained, such as published
        weights. They are an argument of the compiled step.
      users: the owners of the examples, if the plan's sampler is `users.sampler(…)`. The loss of a
        user is the mean over its examples.
      has_aux: whether `loss_fn` returns (loss, aux). Auxiliary outputs are private and are dropped.
      microbatch_size: as for `clipped_grad`.
      mesh: devices along an axis "data" that share each batch; None for one device.
      key: of the noise, new for each run. By default, `dpoptax.random_key_from_os()`.
      fixed_point: whether the guarantee holds for every bit of the parameters.
      budget: ε at the plan's δ. No step that would exceed it is taken.
      evaluate: `evaluate(params)` returns metrics by name, or None.
      eval_every: steps between evaluations; by default a tenth of the plan's. There is also one
        before the first step and one after the last.
      log: gets a record of each evaluation, with step, ε, metrics and seconds: a list, the path of
        a file of JSON lines, or a function of one record. A run that goes on logs earlier records
        again.
      workdir: folder for checkpoints and metrics.jsonl. If it holds a run that was stopped, the
        same call goes on with it, and ends with the same parameters bit for bit. It then uses that
        run's key and seed.
      checkpoint_every: steps between checkpoints.
      progress: whether to show a progress bar with ε, if the run takes more than a second.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: an argument is out of range; the data do not fit the plan or are not finite; one
        step exceeds the budget; or the run in `workdir` is another one.
      OSError: a checkpoint cannot be written, or there are some and none can be read.

    >>> import dpoptax, jax.numpy as jnp, optax
    >>> data = jnp.arange(100.0) / 100
    >>> plan = dpoptax.PrivacyPlan(dataset_size=100, batch_size=50, steps=8, noise_multiplier=2)
    >>> loss_fn = lambda x, example: (x - example) ** 2
    >>> result = fit(loss_fn, jnp.zeros(()), data, plan, optimizer=optax.sgd(0.5), progress=False)
    >>> result.params.shape, result.steps, round(result.guarantee.stated_epsilon, 2)
    ((), 8, 3.54)
    """
    if not isinstance(plan, dpoptax.PrivacyPlan):
        raise TypeError(f"`plan` must be a `dpoptax.PrivacyPlan`, got {plan!r}.")
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"`optimizer` must be an optax transformation, got {optimizer!r}.")
    eval_every = max(1, plan.steps // 10) if eval_every is None else eval_every
    for name, every in (("eval_every", eval_every), ("checkpoint_every", checkpoint_every)):
        if every < 1:
            raise ValueError(f"`{name}` must be at least 1, got {every}.")
    random, place = inputs.takes_key(loss_fn), inputs.devices_of(mesh)
    progress = progress and jax.process_index() == 0
    phases = Phases(say if progress else None)
    with phases("data"):
        data = inputs.checked_data(data, plan, users, place)
    with phases("accounting"):
        steps = plan.steps if budget is None else plan.steps_within(budget)

    def gradient_of(frozen: Any) -> Callable[..., Any]:
        loss = loss_fn if frozen is None else functools.partial(loss_fn, frozen=frozen)
        if users is not None:
            loss = per_user_loss(loss, has_aux=has_aux)
        options = {"has_aux": has_aux, "microbatch_size": microbatch_size, "mesh": place.mesh}
        return private_gradient(loss, clip, **options)

    with contextlib.ExitStack() as stack:
        checkpoints, earlier = None, {}
        if workdir is not None:
            workdir = Path(workdir)
            checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints"))
            with phases("checkpoints"):
                begun = resume.begun(checkpoints, workdir)
            earlier = resume.shown_records(workdir / resume.METRICS)
            if begun is not None:
                plan, key = continuing.continued(plan, key, fixed_point, begun, workdir)
        key = dpoptax.random_key_from_os() if key is None else key
        observe = stack.enter_context(_observer(log, workdir, earlier))
        observe = resume.as_shown(observe, earlier) if fixed_point else observe
        context = Context(place, phases, checkpoints, observe, progress, max(earlier, default=0))
        with phases("init"):
            stages = [plan.noise(key, fixed_point=fixed_point, clip=clip), optimizer]
            if random:
                stages.insert(1, step_keys(seeds.random_key(key)))
            chain = optax.chain(*stages)
            frozen = inputs.on_devices("frozen", frozen, place)
            params = inputs.on_devices("params", params, place)
            opt_state = inputs.on_devices("optimizer", chain.init(params), place)
        feed = Feed(plan.sampler, data, place, resident=inputs.resident(data, place), users=users)
        with phases("compile"):
            example = (params, opt_state), *feed(0), frozen
            lowered = lower_step(make_step(gradient_of, chain), example, place.mesh)
        with phases("data"):
            identity = continuing.identify(plan, key, fixed_point, lowered, context)
            if checkpoints is not None:
                hashed = continuing.fingerprint_of(plan, data, frozen, users)
                identity = dataclasses.replace(identity, data=hashed)
            resume.check_same_on_hosts(identity)
        job = Job(
            name="training",
            steps=steps,
            frozen=frozen,
            feed=feed,
            compile=lambda _: lowered.compile(),
            evaluate=_metrics(evaluate),
            bounds=functools.partial(_bounds, plan),
            identity=identity,
            eval_every=eval_every,
            checkpoint_every=checkpoint_every,
            patience=PATIENCE,
        )
        first = State(0, params, opt_state)
        del params, opt_state, example  # a restored state replaces them
        course = Course(job, first, context)
        del first
        course.finish()
    state = course.state
    guarantee = plan.guarantee(state.opt_state)
    return FitResult(state.params, state.opt_state, guarantee, list(state.history), plan)


@contextlib.contextmanager
def _observer(
    log: Log, workdir: Path | None, earlier: Mapping[int, Record]
) -> Iterator[Callable[[Record], object]]:
    """Returns a function that writes records to the folder and to the log, on the first host."""
    with contextlib.ExitStack() as stack:
        sinks: list[Callable[[Record], object]] = []
        if workdir is not None:
            file = outputs.metrics_file(workdir / resume.METRICS, max(earlier, default=0))
            sinks.append(stack.enter_context(file))
        if isinstance(log, str | Path):
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            sinks.append(stack.enter_context(outputs.metrics_file(Path(log))))
        elif isinstance(log, list):
            sinks.append(log.append)
        elif callable(log):
            sinks.append(log)
        elif log is not None:
            raise TypeError(f"`log` must be a list, a path or a function, got {log!r}.")

        def observe(record: Record) -> None:
            for sink in sinks if jax.process_index() == 0 else ():
                sink(dict(record))

        yield observe


def _metrics(
    evaluate: Callable[[Any], Mapping[str, Any] | None] | None,
) -> Callable[[Any, Any], Record]:
    """Returns the function that makes the metrics of a record, as JSON values."""
    if evaluate is None:
        return lambda *_: {}
    if not callable(evaluate):
        raise TypeError(f"`evaluate` must be a function of the parameters, got {evaluate!r}.")

    def metrics(params: Any, opt_state: Any) -> Record:
        del opt_state
        found = evaluate(inputs.copied(params))  # the next step takes the arrays
        if found is not None and not isinstance(found, Mapping):
            raise TypeError(f"`evaluate` must return metrics by name or None, got {found!r}.")
        found = {str(name): np.asarray(value).tolist() for name, value in (found or {}).items()}
        if taken := found.keys() & {"step", "epsilon", "seconds"}:
            raise ValueError(f"`evaluate` must not return {sorted(taken)}, which records have.")
        return found

    return metrics


def _bounds(plan: dpoptax.PrivacyPlan, steps: Sequence[int]) -> dict[int, float | None]:
    curve = plan.guarantee().epsilon_curve(steps, plan.delta)
    return {s: float(e) if np.isfinite(e) else None for s, e in zip(steps, curve, strict=True)}
