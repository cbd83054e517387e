"""Computes the cost of a run without training: noise, ε, memory and operations."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

import dpoptax
from dpoptax import sampling
from dpoptax.runs import to_decimals
from dpoptax.training.bars import Bar
from dpoptax.training.config import Config
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import files
from dpoptax.training.run.program import RunProgram
from dpoptax.training.task import PlainPlan, Task

if TYPE_CHECKING:  # help must not load the accounting
    from dpoptax.accounting import Guarantee


@dataclasses.dataclass(frozen=True)
class RunCost:
    """Cost of a run. Memory is that of a single device.

    Attributes:
        task: The run.
        num_params: Number of trained parameters.
        num_frozen: Number of frozen parameters.
        params_bytes: Memory of both.
        state_bytes: Memory of the optimizer state, with filter, iterates and ledger.
        batch_bytes: Memory of one batch.
        flops: Floating-point operations of one step on the largest batch. Of two branches, the
            longer one counts. None if not counted.
    """

    task: Task
    num_params: int
    num_frozen: int
    params_bytes: int
    state_bytes: int
    batch_bytes: int
    flops: float | None


def plan_run(task: Task, *, count_flops: bool = True) -> RunCost:
    """Computes the cost of a task from shapes.

    FLOPs are those of the traced step before compiler optimizations, with the whole padded batch at
    once.

    Args:
        task: The task. Its parameters may be shapes.
        count_flops: Whether to trace the step.
    """
    # The body of a loop counts once, so microbatches would hide most examples.
    whole = dataclasses.replace(task, microbatch_size=task.plan.sampler.padded_size)
    program = RunProgram(whole)
    arguments = program.arguments()
    (params, state), inputs, frozen = arguments
    flops = None
    if count_flops:
        lowered: Any = jax.jit(program.step()).lower(*arguments)
        flops = float(lowered.cost_analysis()["flops"])
    return RunCost(
        task=task,
        num_params=_count(params),
        num_frozen=_count(frozen),
        params_bytes=_bytes((params, frozen)),
        state_bytes=_bytes(state),
        batch_bytes=_bytes(inputs.examples),
        flops=flops,
    )


def text(name: str, cost: RunCost) -> str:
    """Formats the cost of one run with a line for each number."""
    task, plan = cost.task, cost.task.plan
    lines = [("method", f"{task.name} on {task.dataset}")]
    if isinstance(plan, PlainPlan):
        lines += [("steps", f"{plan.steps:,}"), ("ε", f"none: {plan.reason}")]
    else:
        if task.budget is not None:
            lines.append(("budget", f"{task.steps:,} of {plan.steps:,} steps"))
        lines.append(("attacks", attacks_text(plan.guarantee())))
        if (other := _balls_in_bins(plan)) is not None:
            lines.append(("or", other))
    frozen = f" trained, {cost.num_frozen:,} frozen" if cost.num_frozen else ""
    lines += [
        ("parameters", f"{cost.num_params:,}{frozen}, {_size(cost.params_bytes)}"),
        ("optimizer", f"{_size(cost.state_bytes)} of state"),
        ("one batch", f"{_size(cost.batch_bytes)} of inputs"),
    ]
    if cost.flops is not None:
        every = cost.flops * plan.steps
        lines.append(("FLOPs", f"{cost.flops:.3g} a step, {every:.3g} in all, about"))
    width = max(len(label) for label, _ in lines)
    rows = [f"  {label:<{width}}  {value}" for label, value in lines]
    head = [] if isinstance(plan, PlainPlan) else str(plan).splitlines()[1:]
    return "\n".join([name, *head, *rows])


def attacks_text(planned: "Guarantee") -> str:
    """Formats the largest true-positive rate at a false-positive rate of 1 %, and μ."""
    found, mu = 1 - float(planned.trade_off(0.01)), planned.gdp_mu(planned.stated_delta)
    return (
        f"true-positive rate at most {to_decimals(100 * found, 1)} % over "
        f"{planned.unit}s at a false-positive rate of 1 %; μ = {to_decimals(mu)}"
    )


def table(configs: dict[str, Config], *, progress: bool = False) -> tuple[str, list[ConfigError]]:
    """Returns a table with the costs of several runs, and the errors of others.

    `progress` shows a bar if this takes more than a second.
    """
    rows = [("run", "steps", "q", "σ", "ε", "parameters", "state")]
    refused: list[ConfigError] = []
    for name, config in Bar(configs.items(), "plan", unit="run", delay=1, disable=not progress):
        try:
            cost = plan_run(config.task(), count_flops=False)
            numbers = _privacy(cost)
        except ValueError as error:
            rows.append((name, "", "", "", "", "", ""))
            refused.append(ConfigError(f"{name}: {error}"))
            continue
        rows.append((name, *numbers, f"{cost.num_params:,}", _size(cost.state_bytes)))
    return files.markdown_table(rows[0], rows[1:]), refused


def _privacy(cost: RunCost) -> tuple[str, str, str, str]:
    """Returns steps, q, σ and ε of a row."""
    task, plan = cost.task, cost.task.plan
    if isinstance(plan, PlainPlan):
        said = "not private" if plan.noise is None else "none proven"
        return f"{plan.steps:,}", "", "", said
    steps = task.steps
    epsilon = dataclasses.replace(plan, steps=steps).epsilon
    noise = plan.noise_multiplier
    sigma = f"{noise:.4g}" if isinstance(noise, int | float) else "schedule"
    rate = f"{plan.sampler.sampling_probability:.4g}"
    return f"{steps:,}", rate, sigma, to_decimals(epsilon)


def _balls_in_bins(plan: "dpoptax.PrivacyPlan") -> str | None:
    """Describes σ and q under random allocation, if σ/q is smaller than for Poisson sampling."""
    sampler, noise = plan.sampler, plan.noise_multiplier
    poisson = type(sampler) is sampling.PoissonSampler and plan.strategy is None
    if not poisson or plan.accountant != "pld" or not isinstance(noise, int | float) or plan.also:
        return None
    allocation = sampling.RandomAllocationSampler(
        sampler.dataset_size, sampler.batch_size, unit=sampler.unit, owners=sampler.owners
    )
    try:
        other = dpoptax.PrivacyPlan(
            sampler=allocation, steps=plan.steps, epsilon=plan.epsilon, delta=plan.delta
        )
    except ValueError:
        return None
    sigma, q = other.noise_multiplier, other.sampler.sampling_probability
    assert isinstance(sigma, int | float)
    if sigma / q >= noise / sampler.sampling_probability:
        return None
    return (
        f"σ = {sigma:.5g} and q = {q:.4g} for the same ε with RandomAllocationSampler, where a "
        f"neighbor has one {sampler.unit} that adds zero, not one more or less"
    )


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _size(count: int) -> str:
    power = min(3, max(0, len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB')[power]}"
