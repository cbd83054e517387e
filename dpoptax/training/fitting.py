"""Trains any loss, parameters and optimizer under a privacy plan."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax

import dpoptax
from dpoptax.runs import Generator
from dpoptax.training.data import streaming
from dpoptax.training.run.context import Log
from dpoptax.training.run.run_task import FitResult, run_task
from dpoptax.training.task import PlainPlan, Task
from dpoptax.users import UserTable


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
    microbatch_size: int | None = None,
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

        `loss_fn` must then be None, and `microbatch_size` be left out. `clip` is needed only if it
        is an `adaptive_clip`, and for correlated noise in fixed point. Give `clipped_grad` the same
        `mesh`, with automatic axes; the run then resumes on as many devices only. `fit` calls
        `grad_fn(points, batch, mask)`, and drops auxiliary outputs, which are private. If it
        requires a keyword `key`, it also gets `key` and `ids`, and with `frozen`, the keyword
        `frozen`. With `users`, the loss is that of `dpoptax.users.per_user_loss`. `grid` may be
        `plan.grid(clip)`.
      frozen: arrays that `loss_fn` uses and that are not trained, such as pretrained weights. They
        are an argument of the compiled step, and placed like `params`.
      users: the owners of the examples, if the plan's sampler is `users.sampler(…)`. The loss of a
        user is the mean loss of its examples.
      microbatch_size: as for `clipped_grad`.
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
