"""Audits a task by attacks on its releases and its training."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from scipy import stats

import dpoptax
from dpoptax import auditing, sampling
from dpoptax.runs import seeded
from dpoptax.training.data import streaming
from dpoptax.training.errors import ConfigError
from dpoptax.training.fitting import make_job
from dpoptax.training.run import inputs, records
from dpoptax.training.run.announcer import Announcer, say
from dpoptax.training.run.context import Context
from dpoptax.training.run.devices import Devices
from dpoptax.training.run.program import RunProgram, any_key
from dpoptax.training.run.training_loop import State, TrainingLoop
from dpoptax.training.task import PlainPlan, Task, least_noise

# Number of parameters in games with a gradient as canary. Small, so that many runs are affordable.
_SMALL = 2
# Other samplers than Poisson are replayed with all records, which takes a hundred times longer.
_REPLAYED = 50
_CANARIES = 1000
# Number of examples of `auditing.searched_canary`.
_SEARCHED = 16

# Explanations of the bounds, by their names in the table.
_MEANINGS = {
    "one threshold": "Clopper-Pearson bound on the errors of one test; for any mechanism",
    "f-DP of (ε, δ)": "number of correct guesses about canaries, by the recursion of Mahloujifar "
    "et al.; for any mechanism",
    "f-DP of the claim": "errors or guesses against the claimed trade-off function at every noise "
    "level; a lower bound on ε if the mechanism is of the claimed kind",
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
    task: Task,
    *,
    trials: int = 20_000,
    confidence: float = 0.999,
    seed: int = 0,
    progress: bool = False,
) -> list[Audited]:
    """Attacks the training of a task and bounds its ε from below.

    The audits are:

    1. one release on a full batch, which shows the power of the attack;
    2. the same with an example found by `auditing.worst_example`, which attacks the clip;
    3. the whole run, with all noisy gradients visible;
    4. the whole run, with only the final parameters visible;
    5. one training of the model by the training loop, with training examples as canaries. It is
       skipped if the unit is a user or the examples are streamed.

    The claim of a whole run is the smaller of two values of ε: the one stated by the plan's
    accountant and the one by privacy loss distributions. The claim of one release is the latter.

    Args:
        task: The run, for the steps that its budget permits.
        trials: Number of runs with the canary, and of runs without it. Audits of one release take
            ten times as many.
        confidence: Confidence of each bound.
        seed: Seed of the attack.
        progress: Whether to announce the duration and each audit on standard error.

    Raises:
        ConfigError: The task claims no ε.
        ValueError: As for training.
    """
    run = _Audit(_claiming(task))
    attacks = [
        *_attacks_on_one_release(run, trials),
        *_attacks_on_whole_run(run, trials),
        *_attacks_on_training(run),
    ]
    if progress:
        say(
            f"{len(attacks)} attacks, which take about {max(2, 4 * trials // 20_000)} minutes "
            "together for a small model and 100 steps on two cores ..."
        )
    rows = []
    for attack in attacks:
        if progress:
            say(f"auditing {task.name}, {attack.title} ...")
        result = attack.run(delta=run.plan.delta, confidence=confidence, key=jax.random.key(seed))
        rows.append(Audited(task.name, attack.name, result))
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
        return RunProgram(self.task, Devices())

    @property
    def clip(self) -> dpoptax.Clip:
        clip = self.program.clip
        return clip if isinstance(clip, dpoptax.Clip) else dpoptax.l2_clip(cast(float, clip))

    @property
    def noise(self) -> optax.GradientTransformation:
        return cast(optax.GradientTransformation, self.program.noise(any_key()))

    @functools.cached_property
    def epsilon(self) -> float:
        """ε that the run states."""
        guarantee = self.task.guarantee()
        assert guarantee is not None
        return guarantee.stated_epsilon

    def one_release(self, batch_size: int) -> optax.GradientTransformation:
        """Returns the noise stage for one full batch of this size."""
        plan = dpoptax.PrivacyPlan(
            sampler=sampling.PoissonSampler(batch_size, batch_size),
            steps=1,
            noise_multiplier=least_noise(self.plan),
            delta=self.plan.delta,
            fixed_point=self.plan.fixed_point,
        )
        one = RunProgram(dataclasses.replace(self.task, plan=plan), Devices())
        return cast(optax.GradientTransformation, one.noise(any_key()))


def table(rows: list[Audited]) -> str:
    """Returns the bounds of the audits as a Markdown table."""
    names = "method, audited, threat model, trials, claimed ε, audited ε ≥, by, seconds"
    lines = []
    for row in rows:
        found = row.result
        claimed, seconds = records.epsilon_text(found.claimed_epsilon), f"{found.seconds:.1f}"
        audit = (row.method, row.name, found.threat_model, str(found.trials), claimed)
        for bound in found.bounds:
            verdict = " **VIOLATED**" if bound.epsilon > found.claimed_epsilon else ""
            shown = records.epsilon_text(bound.epsilon, lower=True) + verdict
            lines.append((*audit, shown, bound.method, seconds))
    return records.markdown_table(names.split(", "), lines)


def notes(rows: list[Audited]) -> list[str]:
    """Returns notes on bounds, refuted claims and the spread over canaries."""
    methods = dict.fromkeys(bound.method for row in rows for bound in row.result.bounds)
    lines = [f"By {method}: {_MEANINGS[method]}." for method in methods]
    for row in rows:
        name, found = f"{row.method}, {row.name}", row.result
        if row.violated:
            lines.append(f"{name}, {found.threat_model}: the claim is refuted.")
        if found.canaries is not None:
            area = auditing.auc(*found.canaries)
            spread = {"n_resamples": 1000, "method": "percentile", "vectorized": False}
            resampled = stats.bootstrap(found.canaries, auditing.auc, **spread, random_state=0)
            low, high = resampled.confidence_interval
            lines.append(
                f"{name}: the attack's area under the curve is {area:.3f}, "
                f"and {low:.3f} to {high:.3f} in 95 % of bootstrap resamples of the canaries. This "
                "spread is not a bound."
            )
    return lines


class _Attack(NamedTuple):
    """An attack that has not run yet.

    Attributes:
        name: Name of the audited release or run.
        title: Text for progress messages. Attacks on the whole run add their threat model.
        run: Builds and plays the game, given δ, confidence and key. Games are built one by one, so
            that unsupported configs fail before the costly search for an example.
    """

    name: str
    title: str
    run: Callable[..., auditing.AuditResult]


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


def _attacks_on_one_release(run: _Audit, trials: int) -> list[_Attack]:
    """Returns attacks on a full batch, by a canary and by the worst example found."""
    games = {
        "one full-batch release": _full_batch,
        "one full-batch release, worst example found": _worst_example,
    }
    return [
        _Attack(name, name, functools.partial(_attack_release, run, make, 10 * trials))
        for name, make in games.items()
    ]


def _attacks_on_whole_run(run: _Audit, trials: int) -> list[_Attack]:
    """Returns attacks on all noisy gradients, and on the final parameters only."""
    name = f"{run.plan.steps} steps"
    poisson = type(run.plan.sampler) is sampling.PoissonSampler
    runs = max(trials if poisson else trials // _REPLAYED, 64)
    views: tuple[tuple[auditing.ThreatModel, optax.GradientTransformation], ...] = (
        ("white-box", run.noise),
        ("last-iterate", run.program.chain(any_key())),
    )
    return [
        _Attack(name, f"{name}, {view[0]}", functools.partial(_attack_view, run, *view, runs))
        for view in views
    ]


def _attacks_on_training(run: _Audit) -> list[_Attack]:
    """Returns an attack on one training if its data are in memory and its unit is an example."""
    if run.task.users is not None or not streaming.in_memory(run.task.data):
        return []
    name = f"one training on {run.task.dataset}"
    return [_Attack(name, name, functools.partial(_attack_training, run))]


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
    sampler = seeded(run.plan.sampler, any_key())
    game = auditing.canary_gradient(
        transform, run.clip, jnp.zeros(_SMALL), sampler, steps=run.plan.steps
    )
    result = auditing.audit(game, trials=trials, threat_model=threat_model, **claim)
    return _as_stated(result, run)


def _attack_training(run: _Audit, **claim: Any) -> auditing.AuditResult:
    return _as_stated(_train(run, **claim), run)


def _full_batch(run: _Audit) -> auditing.Game:
    size = run.plan.sampler.dataset_size
    sampler = sampling.PoissonSampler(size, size, seed=0)
    return auditing.canary_gradient(run.one_release(size), run.clip, jnp.zeros(_SMALL), sampler)


def _worst_example(run: _Audit) -> auditing.Game:
    # Full batches, so that ε is that of one release, as above.
    return auditing.searched_canary(run.one_release(_SEARCHED), run.clip)[0]


def _as_stated(result: auditing.AuditResult, run: _Audit) -> auditing.AuditResult:
    """Replaces the claim by the ε that the run states, if it is smaller.

    It is smaller if the accountant uses amplification that privacy loss distributions do not, such
    as "monte_carlo".
    """
    stated = run.epsilon
    if stated >= result.claimed_epsilon or result.claimed is None:
        return result
    claims = result.claimed, auditing.approximate_trade_off(stated, result.delta)

    def curve(alpha: NDArray[np.float64], rest: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(*(claim.curve(alpha, rest) for claim in claims))

    both = auditing.TradeOff(", and ".join(claim.name for claim in claims), curve)
    return dataclasses.replace(result, claimed_epsilon=stated, claimed=both)


class _AuditState(NamedTuple):
    """State of an audited chain."""

    release: Any
    following: Any
    canaries: Any
    frozen: Any
    scores: jax.Array


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Draws the batches of a sampler without the excluded records."""

    sampler: sampling.Sampler
    kept: np.ndarray

    @property
    def padded_size(self) -> int:
        return self.sampler.padded_size

    def sample(self, step: int) -> sampling.Sample:
        indices, mask = self.sampler.sample(step)
        return sampling.Sample(indices, mask & self.kept[indices])


def _train(run: _Audit, key: jax.Array, **claim: Any) -> auditing.AuditResult:
    """Trains once on a random subset of the canaries and scores all canaries.

    Each canary is included with probability 1/2. The attacker sees every noisy gradient. The score
    of a canary is the projection of these on the clipped gradients of the canary, summed over the
    steps.
    """
    start = time.perf_counter()
    noise_key, coin_key = jax.random.split(key)
    task, steps = run.task, run.plan.steps
    size = streaming.source_size(task.data)
    count = min(_CANARIES, size)
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (count,)))
    kept = np.concatenate([np.ones(size - count, bool), included])
    rows = np.arange(size - count, size, dtype=np.int32)
    canaries = streaming.read(task.data, rows[:, None]), rows[:, None]
    params = inputs.on_devices("params", task.params, Devices())
    program = RunProgram(dataclasses.replace(task, params=params), Devices())
    release = cast(optax.GradientTransformation, program.noise(noise_key))
    step, following = program.step(noise_key), optax.chain(*program.following(noise_key))

    def init(params: Any) -> _AuditState:
        # Data are arguments, because the compilation cache on disk stores constants of programs.
        # They are copied, because a step donates the arrays of its state.
        data, frozen = jax.tree.map(jnp.array, (canaries, task.frozen))
        states = release.init(params), following.init(params)
        return _AuditState(*states, data, frozen, jnp.zeros(count))

    def update(clipped: Any, state: _AuditState, params: Any) -> tuple[Any, _AuditState]:
        released, after = release.update(clipped, state.release, params)
        gradient = step.gradient(state.frozen)
        states = state.release, state.following

        def score(canary: Any) -> jax.Array:
            example, row = canary
            alone = gradient(params, states, example, jnp.ones(1, bool), row)
            return jnp.sum(auditing.leaf_projections(released, alone.decode(alone.sum)))

        scores = state.scores + jax.lax.map(score, state.canaries, batch_size=64)
        updates, moved = following.update(released, state.following, params)
        return updates, state._replace(release=after, following=moved, scores=scores)

    audited = optax.GradientTransformation(init, update)
    sampler = seeded(run.plan.sampler, noise_key)
    job = make_job(program, noise_key, step, steps, exact=False, eval_every=steps)
    job = dataclasses.replace(
        job,
        sampler=lambda opt_state: cast(Any, _Drawn(sampler, kept)),
        step=dataclasses.replace(step, optimizer=audited),
        evaluate=lambda *_: {},
        shown=lambda params, opt_state: (params,),
    )
    loop = TrainingLoop(job, State(0, params, init(params)), Context(Devices(), Announcer()))
    loop.finish()
    state = loop.state.opt_state
    scores = np.asarray(state.scores)
    result = auditing.audit_scores(scores, included, state.release, sampler, **claim)
    return dataclasses.replace(result, seconds=time.perf_counter() - start)
