"""Audits a task by attacks on its releases."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

import dpoptax
from dpoptax import auditing, sampling
from dpoptax.runs import seeded, to_decimals
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import files
from dpoptax.training.run.announcer import say
from dpoptax.training.run.program import RunProgram
from dpoptax.training.task import PlainPlan, Task, least_noise

# Number of parameters in games with a gradient as canary. Small, so that many runs are affordable.
_SMALL = 2
# Other samplers than Poisson are replayed with all records, which takes a hundred times longer.
_REPLAYED = 50
# Number of examples of `auditing.searched_canary`.
_SEARCHED = 16

# Plays one attack, given δ, confidence and key. Games are built one by one, so that unsupported
# configs fail before the costly search for an example.
_Attack: TypeAlias = Callable[..., auditing.AuditResult]

# Explanations of the bounds, by their names in the table.
_MEANINGS = {
    "one threshold": "Clopper-Pearson bound on the errors of one test; for any mechanism",
    "f-DP of the claim": "errors against the claimed trade-off function at every noise level; a "
    "lower bound on ε if the mechanism is of the claimed kind",
}


@dataclasses.dataclass(frozen=True)
class Audited:
    """Result of one attack, with a row of the table for each bound.

    Attributes:
        method: Name of the task.
        name: Name of the audit.
        result: Result of the audit.
    """

    method: str
    name: str
    result: auditing.AuditResult

    @property
    def violated(self) -> bool:
        """Whether any of the bounds refutes the claim."""
        return self.result.violated or any(
            bound.epsilon > self.result.claimed_epsilon for bound in self.result.bounds
        )


def audit_task(
    task: Task, *, trials: int = 20_000, confidence: float = 0.999, progress: bool = False
) -> list[Audited]:
    """Attacks the releases of a task and bounds its ε from below.

    The audits are:

    1. one release on a full batch, which shows the power of the attack;
    2. the same with an example found by `auditing.worst_example`, which attacks the clip;
    3. the whole run, with all noisy gradients visible;
    4. the whole run, with only the final parameters visible.

    Claims are ε by privacy loss distributions.

    Args:
        task: The run, for the steps that its budget permits.
        trials: Number of runs with the canary, and of runs without it. Audits of one release take
            ten times as many.
        confidence: Confidence of each bound.
        progress: Whether to announce the duration and each audit on standard error.

    Raises:
        ConfigError: The task claims no ε.
        ValueError: As for training.
    """
    run = _Audit(_claiming(task))
    attacks = list(_attacks(run, trials))
    if progress:
        say(
            f"{len(attacks)} attacks, which take about {max(2, 4 * trials // 20_000)} minutes "
            "together for a small model and 100 steps on two cores ..."
        )
    rows = []
    for name, title, attack in attacks:
        if progress:
            say(f"auditing {task.name}, {title} ...")
        result = attack(delta=run.plan.delta, confidence=confidence, key=jax.random.key(0))
        rows.append(Audited(task.name, name, result))
    return rows


@dataclasses.dataclass(frozen=True)
class _Audit:
    """The audited run, with a fixed key: audits of many runs fold a key for each run into it."""

    task: Task

    @property
    def plan(self) -> dpoptax.PrivacyPlan:
        return cast(dpoptax.PrivacyPlan, self.task.plan)

    @functools.cached_property
    def program(self) -> RunProgram:
        return RunProgram(self.task)

    @property
    def clip(self) -> dpoptax.Clip | float:
        return cast(dpoptax.Clip | float, self.task.applied_clip)

    def one_release(self, batch_size: int) -> optax.GradientTransformation:
        """Returns the noise stage for one full batch of this size."""
        plan = dpoptax.PrivacyPlan(
            sampler=sampling.PoissonSampler(batch_size, batch_size),
            steps=1,
            noise_multiplier=least_noise(self.plan),
            delta=self.plan.delta,
            fixed_point=self.plan.fixed_point,
        )
        one = RunProgram(dataclasses.replace(self.task, plan=plan))
        return cast(optax.GradientTransformation, one.noise())


def table(rows: list[Audited]) -> str:
    """Returns the bounds of the audits as a Markdown table."""
    names = "method, audited, threat model, trials, claimed ε, audited ε ≥, by, seconds"
    lines = []
    for row in rows:
        found = row.result
        claimed, seconds = to_decimals(found.claimed_epsilon), f"{found.seconds:.1f}"
        audit = (row.method, row.name, found.threat_model, str(found.trials), claimed)
        for bound in found.bounds:
            verdict = " **VIOLATED**" if bound.epsilon > found.claimed_epsilon else ""
            shown = to_decimals(bound.epsilon, lower=True) + verdict
            lines.append((*audit, shown, bound.method, seconds))
    return files.markdown_table(names.split(", "), lines)


def notes(rows: list[Audited]) -> list[str]:
    """Returns notes on bounds and refuted claims."""
    methods = dict.fromkeys(bound.method for row in rows for bound in row.result.bounds)
    lines = [f"By {method}: {_MEANINGS[method]}." for method in methods]
    return lines + [
        f"{row.method}, {row.name}, {row.result.threat_model}: the claim is refuted."
        for row in rows
        if row.violated
    ]


def _claiming(task: Task) -> Task:
    """Returns the task of the permitted steps, or raises if it claims no ε."""
    if isinstance(task.plan, PlainPlan):
        raise ConfigError(
            f"`plan` must have a privacy proof to be audited, got {task.name}: {task.plan.reason}. "
            "To audit an ε that others claim for it, use dpoptax.auditing with `claimed_epsilon`."
        )
    if not task.is_private or task.grad_fn is not None:
        raise ConfigError(
            f"`config` must claim an ε for its own clip to be audited, got {task.name} with "
            f"noise_multiplier={task.plan.noise_multiplier} and grad_fn={task.grad_fn}."
        )
    return dataclasses.replace(task, plan=dataclasses.replace(task.plan, steps=task.steps))


def _attacks(run: _Audit, trials: int) -> Iterator[tuple[str, str, _Attack]]:
    """Yields names of attacks, titles for progress messages, and the attacks."""
    for name, make in {
        "one full-batch release": _full_batch,
        "one full-batch release, worst example found": _worst_example,
    }.items():
        yield name, name, functools.partial(_attack_release, run, make, 10 * trials)
    name = f"{run.plan.steps} steps"
    poisson = type(run.plan.sampler) is sampling.PoissonSampler
    runs = max(trials if poisson else trials // _REPLAYED, 64)
    views: dict[auditing.ThreatModel, optax.GradientTransformation] = {
        "white-box": cast(optax.GradientTransformation, run.program.noise()),
        "last-iterate": run.program.chain(),
    }
    for view, transform in views.items():
        attack = functools.partial(_attack_view, run, view, transform, runs)
        yield name, f"{name}, {view}", attack


def _attack_release(
    run: _Audit, make: Callable[[_Audit], auditing.Game], trials: int, **claim: Any
) -> auditing.AuditResult:
    return auditing.audit(make(run), trials=trials, **claim)


def _attack_view(
    run: _Audit,
    threat_model: auditing.ThreatModel,
    transform: optax.GradientTransformation,
    trials: int,
    **claim: Any,
) -> auditing.AuditResult:
    sampler = seeded(run.plan.sampler, run.program.key)
    game = auditing.canary_gradient(
        transform, run.clip, jnp.zeros(_SMALL), sampler, steps=run.plan.steps
    )
    return auditing.audit(game, trials=trials, threat_model=threat_model, **claim)


def _full_batch(run: _Audit) -> auditing.Game:
    size = run.plan.sampler.dataset_size
    sampler = sampling.PoissonSampler(size, size, seed=0)
    return auditing.canary_gradient(run.one_release(size), run.clip, jnp.zeros(_SMALL), sampler)


def _worst_example(run: _Audit) -> auditing.Game:
    # Full batches, so that ε is that of one release, as above.
    return auditing.searched_canary(run.one_release(_SEARCHED), run.clip)[0]
