"""Computes the cost of a run without training: noise, ε, memory and operations."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import numpy as np

from dpoptax.training import models
from dpoptax.training.bars import Bar
from dpoptax.training.config import TrainConfig
from dpoptax.training.data.dataset import Shapes
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import records
from dpoptax.training.run.chain import build_chain
from dpoptax.training.run.feeding import Loaded
from dpoptax.training.run.privacy import make_run_plan
from dpoptax.training.run.resolved import ResolvedRun, build_step, resolve
from dpoptax.training.run.run_plan import RunPlan

if TYPE_CHECKING:  # help must not load the accounting
    from dpoptax.accounting import Guarantee


@dataclasses.dataclass(frozen=True)
class RunCost:
    """Cost of a run. Memory is that of a single device.

    Attributes:
        config: The run.
        dataset_size: Number of training examples, or of users if the unit is a user.
        expected_batch_size: B, or slightly less for random allocation.
        sampling_probability: q, the expected batch size over the data set size. None without
            privacy.
        steps: Number of steps that will run, at most those of the config.
        noise_multiplier: σ relative to the clip norm; 0 without privacy.
        epsilon: ε after `steps`, or None without a guarantee.
        promise: The neighboring relation, such as "add-or-remove-one", with "user" if that is the
            unit. For runs without a guarantee, the reason.
        num_params: Number of trained parameters.
        num_frozen: Number of frozen parameters.
        params_bytes: Memory of both.
        state_bytes: Memory of the optimizer state, with filter, iterates and ledger.
        batch_bytes: Memory of one batch of inputs and labels.
        rows: Number of rows of that batch, including padding.
        flops: Floating-point operations of one step on the largest batch. Of two branches, the
            longer one counts. None if not counted.
        attacks: Power of attacks: the largest true-positive rate at a false-positive rate of 1 %,
            and μ. None without a guarantee, or if not requested.
        balls_in_bins: σ and q for the same ε if each example takes part once per epoch, if σ/q, the
            noise on the mean, is then smaller. None otherwise, or if not requested.
    """

    config: TrainConfig
    dataset_size: int
    expected_batch_size: float
    sampling_probability: float | None
    steps: int
    noise_multiplier: float
    epsilon: float | None
    promise: str
    num_params: int
    num_frozen: int
    params_bytes: int
    state_bytes: int
    batch_bytes: int
    rows: int
    flops: float | None
    attacks: tuple[float, float] | None = None
    balls_in_bins: tuple[float, float] | None = None


def plan_run(config: TrainConfig, *, count_flops: bool = True, details: bool = False) -> RunCost:
    """Computes the cost of a run of `config`.

    If `data_dir` is needed but not given, published sizes replace the data where they are known.
    Memory is computed from shapes. FLOPs are those of the traced step before compiler
    optimizations, with the whole padded batch at once.

    Args:
        config: The run.
        count_flops: Whether to trace the step.
        details: Whether to compute `attacks` and `balls_in_bins`, which takes seconds.

    Raises:
        ValueError: The config cannot be trained.
    """
    shapes = config.data().shapes(config.unit)
    size = shapes.units
    plan = make_run_plan(config, size)
    run = resolve(config, plan, num_classes=shapes.num_classes)
    arguments = step_arguments(run, shapes)
    params, state, loaded, _, frozen = arguments

    flops = None
    if count_flops:
        # The body of a loop counts once, so microbatches would hide most examples.
        at_once = dataclasses.replace(config, microbatch_size=None)
        keys, random = run.chain.keys, run.chain.random
        chain = build_chain(at_once, plan.noise_multiplier, keys, random=random)
        lowered: Any = jax.jit(build_step(chain, run.model)).lower(*arguments)
        flops = float(lowered.cost_analysis()["flops"])
    planned = plan.guarantee(plan.permitted_steps) if details else None
    promise, expected, rate = "not private", float(config.batch_size), None
    if config.method.private:
        rate = plan.sampler.sampling_probability
        expected = rate * plan.sampler.dataset_size
        promise = plan.sampler.neighboring_relation + " user" * (config.unit == "user")
    return RunCost(
        config=config,
        dataset_size=size,
        expected_batch_size=expected,
        sampling_probability=rate,
        steps=plan.permitted_steps,
        noise_multiplier=plan.noise_multiplier,
        epsilon=plan.epsilon(plan.permitted_steps),
        promise=plan.unproven or promise,
        num_params=_count(params),
        num_frozen=_count(frozen),
        params_bytes=_bytes((params, frozen)),
        state_bytes=_bytes(state),
        batch_bytes=_bytes(loaded.batch),
        rows=plan.sampler.padded_size,
        flops=flops,
        attacks=None if planned is None else attacks(planned),
        balls_in_bins=_balls_in_bins(config, plan, size) if details else None,
    )


def step_arguments(run: ResolvedRun, shapes: Shapes) -> tuple[Any, ...]:
    """Returns shapes and types of the arguments of a step, with a `Loaded` batch."""
    params, frozen = variables(run.model, shapes.example["inputs"])
    state = jax.eval_shape(run.chain.optimizer.init, params)
    rows = run.plan.sampler.padded_size
    indices = jax.ShapeDtypeStruct((rows,), np.int32)
    of_each: tuple[int, ...] = (rows,)
    rows_mask = None
    if run.config.records_per_user is not None:
        of_each = (rows, run.config.records_per_user)
        rows_mask = jax.ShapeDtypeStruct(of_each, np.bool_)
    loaded = _stacked(shapes.example, *of_each)
    batch = Loaded(loaded if rows_mask is None else (loaded, rows_mask), indices)
    return params, state, batch, jax.ShapeDtypeStruct((rows,), np.bool_), frozen


@functools.lru_cache(maxsize=64)
def variables(model: nn.Module, inputs: jax.ShapeDtypeStruct) -> models.Variables:
    """Returns shapes and types of the variables of a model."""
    init = functools.partial(models.initial_variables, model)
    key = jax.eval_shape(jax.random.key, 0)
    shapes: models.Variables = jax.eval_shape(init, inputs, key)
    return shapes


def _stacked(example: dict[str, jax.ShapeDtypeStruct], *counts: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*counts, *x.shape), x.dtype), example)


def text(name: str, cost: RunCost) -> str:
    """Formats the cost of one run with a line for each number."""
    config = cost.config
    epochs = cost.steps * cost.expected_batch_size / cost.dataset_size
    expected = f"{round(cost.expected_batch_size, 1):,.12g}"
    optimizer = config.optimizer if config.method.direction(1.0) is None else "its own optimizer"
    lines = [
        ("method", f"{config.method.name}, {optimizer}, {config.model} on {config.dataset}"),
        ("steps", f"{cost.steps:,} of {config.steps:,}, {epochs:.4g} epochs"),
        ("batch", f"{expected} expected of {cost.dataset_size:,}{_users(config)}"),
    ]
    if config.method.private:
        lines += [
            ("q", f"{cost.sampling_probability:.4g}"),
            ("σ", f"{cost.noise_multiplier:.5g} of the clip norm {config.l2_clip_norm:g}"),
            ("ε", _epsilon(cost)),
        ]
    if cost.balls_in_bins is not None:
        sigma, q = cost.balls_in_bins
        lines.append(
            (
                "or",
                f"σ = {sigma:.5g} and q = {q:.4g} for the same ε with --sampling balls_in_bins, "
                f"where a neighbor has one {config.unit} that adds zero, not one more or less",
            )
        )
    if cost.attacks is not None:
        lines.append(("attacks", attacks_text(*cost.attacks, config.unit)))
    lines += [
        ("parameters", _parameters(cost)),
        ("optimizer", f"{_size(cost.state_bytes)} of state"),
        ("one batch", f"{_size(cost.batch_bytes)} of inputs"),
    ]
    if cost.flops is not None:
        lines.append(
            ("FLOPs", f"{cost.flops:.3g} a step, {cost.flops * cost.steps:.3g} in all, about")
        )
    width = max(len(label) for label, _ in lines)
    return "\n".join([name, *(f"  {label:<{width}}  {value}" for label, value in lines)])


def attacks_text(found: float, mu: float, unit: str) -> str:
    """Formats the power of attacks; see `RunCost`."""
    return (
        f"true-positive rate at most {records.epsilon_text(100 * found, 1)} % over {unit}s at a "
        f"false-positive rate of 1 %; μ = {records.epsilon_text(mu)}"
    )


def table(
    configs: dict[str, TrainConfig], *, progress: bool = False
) -> tuple[str, list[ConfigError]]:
    """Returns a table with the costs of several runs, and the errors of others.

    `progress` shows a bar if this takes more than a second.
    """
    rows = [("run", "steps", "q", "σ", "ε", "parameters", "state")]
    refused: list[ConfigError] = []

    def cost_of(config: TrainConfig) -> RunCost | ConfigError:
        try:
            return plan_run(config, count_flops=False)
        except ConfigError as error:
            return error

    bar = Bar(configs.values(), "plan", unit="run", delay=1, disable=not progress)
    costs = [cost_of(config) for config in bar]
    for (name, config), cost in zip(configs.items(), costs, strict=True):
        if isinstance(cost, ConfigError):
            rows.append((name, "", "", "", "", "", ""))
            refused.append(ConfigError(f"{name}: {cost}"))
            continue
        private = config.method.private
        epsilon = "none proven" if private and cost.epsilon is None else "not private"
        rows.append(
            (
                name,
                f"{cost.steps:,}",
                f"{cost.sampling_probability:.4g}" if private else "",
                f"{cost.noise_multiplier:.4g}" if private else "",
                epsilon if cost.epsilon is None else records.epsilon_text(cost.epsilon),
                f"{cost.num_params:,}",
                _size(cost.state_bytes),
            )
        )
    return records.markdown_table(rows[0], rows[1:]), refused


def _users(config: TrainConfig) -> str:
    if config.unit == "example":
        return ""
    return f" users, at most {config.records_per_user:,} examples of each"


def attacks(planned: "Guarantee") -> tuple[float, float]:
    """Returns the power of attacks on a planned run; see `RunCost`."""
    return 1 - float(planned.trade_off(0.01)), planned.gdp_mu(planned.stated_delta)


def _balls_in_bins(config: TrainConfig, plan: RunPlan, size: int) -> tuple[float, float] | None:
    """Returns σ and q of a calibrated Poisson run under random allocation, if σ/q is smaller."""
    calibrated = config.epsilon is not None and config.noise_multiplier is None
    exact = config.accountant == "pld" and plan.strategy is None
    if plan.promise is None or config.sampling != "poisson" or not (calibrated and exact):
        return None
    other = make_run_plan(dataclasses.replace(config, sampling="balls_in_bins"), size)
    sigma, q = other.noise_multiplier, other.sampler.sampling_probability
    gains = sigma / q < plan.noise_multiplier / plan.sampler.sampling_probability
    return (sigma, q) if gains else None


def _epsilon(cost: RunCost) -> str:
    if cost.epsilon is None:
        return f"none: {cost.promise}" if cost.noise_multiplier else "none: no noise"
    return (
        f"{records.epsilon_text(cost.epsilon)} at δ = {records.delta_text(cost.config.delta)} "
        f"({cost.config.accountant}, {cost.promise}, {cost.config.sampling} sampling)"
    )


def _parameters(cost: RunCost) -> str:
    frozen = f" trained, {cost.num_frozen:,} frozen" if cost.num_frozen else ""
    return f"{cost.num_params:,}{frozen}, {_size(cost.params_bytes)}"


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(count: int) -> str:
    power = min(3, max(0, len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"
