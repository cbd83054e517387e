"""Audits a config by attacks on its releases and its training."""

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

from dpoptax import auditing, sampling
from dpoptax.training.config import TrainConfig
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.errors import ConfigError
from dpoptax.training.loop import make_job
from dpoptax.training.run import devices, records, seeds
from dpoptax.training.run.chain import TrainingChain, build_chain
from dpoptax.training.run.context import Context
from dpoptax.training.run.course import Course, State
from dpoptax.training.run.phases import Phases, say
from dpoptax.training.run.privacy import plan_on_data
from dpoptax.training.run.resolved import ResolvedRun, resolve
from dpoptax.training.run.seeds import Keys

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
    "(ε, δ), Steinke et al.": "number of correct guesses about canaries; for any mechanism",
    "f-DP of (ε, δ)": "the same guesses by Mahloujifar et al.'s recursion; for any mechanism",
    "f-DP of the claim": "errors or guesses against the claimed trade-off function at every noise "
    "level; a lower bound on ε if the mechanism is of the claimed kind",
}


@dataclasses.dataclass(frozen=True)
class Audited:
    """Result of one attack, with a row of the table for each bound.

    Attributes:
        method: Name of the config's method.
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


def audit_config(
    config: TrainConfig,
    *,
    trials: int = 20_000,
    confidence: float = 0.999,
    seed: int = 0,
    progress: bool = False,
) -> list[Audited]:
    """Attacks the training of a config and bounds its ε from below.

    The audits are:

    1. one release on a full batch, which shows the power of the attack;
    2. the same with an example found by `auditing.worst_example`, which attacks the clip;
    3. the whole run, with all noisy and filtered updates visible;
    4. the whole run, with only the final parameters visible;
    5. one training of the model by the training loop, with training examples as canaries. It is
       skipped if the unit is a user or the examples are streamed.

    The claim of a whole run is the smaller of two values of ε: the one stated by the config's
    accountant and the one by privacy loss distributions. The claim of one release is the latter.

    Args:
        config: The run, for the steps that its budget permits.
        trials: Number of runs with the canary, and of runs without it. Audits of one release take
            ten times as many.
        confidence: Confidence of each bound.
        seed: Seed of the attack.
        progress: Whether to announce the duration and each audit on standard error.

    Raises:
        ConfigError: The config claims no ε.
        ValueError: As for training.
    """
    _check_claim(config)
    run, dataset = _repeatable_run(config)
    attacks = [
        *_attacks_on_one_release(run, trials),
        *_attacks_on_whole_run(run, trials),
        *_attacks_on_training(run, dataset),
    ]
    if progress:
        say(
            f"{len(attacks)} attacks, which take about {max(2, 4 * trials // 20_000)} minutes "
            "together for a small model and 100 steps on two cores ..."
        )
    rows = []
    for attack in attacks:
        if progress:
            say(f"auditing {config.method.name}, {attack.title} ...")
        result = attack.run(delta=config.delta, confidence=confidence, key=jax.random.key(seed))
        rows.append(Audited(config.method.name, attack.name, result))
    return rows


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
            low, high = auditing.bootstrap_interval(found.canaries)
            lines.append(
                f"{name}: the attack's area under the curve is {found.canaries.auc:.3f}, and "
                f"{low:.3f} to {high:.3f} in 95 % of bootstrap resamples of the canaries. This "
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


def _check_claim(config: TrainConfig) -> None:
    """Raises if the config claims no ε."""
    if not config.method.private or config.noise_multiplier == 0:
        raise ConfigError(
            f"`config` must claim an ε to be audited, got method={config.method.name} with "
            f"noise_multiplier={config.noise_multiplier}. Use a private method with noise."
        )
    if (unproven := config.method.unproven()) is not None:
        raise ConfigError(
            f"`method` must have a privacy proof to be audited, got {config.method.name}: "
            f"{unproven}. To audit an ε that others claim for it, use dpoptax.auditing with "
            "`claimed_epsilon`."
        )


def _repeatable_run(config: TrainConfig) -> tuple[ResolvedRun, Dataset]:
    """Returns the run of a config, with a fixed seed and key, and its data."""
    # A fixed seed makes audits repeatable.
    config = dataclasses.replace(config, seed=config.seed or 0)
    dataset = config.data().load()
    plan = plan_on_data(config, dataset)
    run = resolve(config, plan, num_classes=dataset.num_classes)
    # A fixed key: audits of many runs fold a key for each run into it.
    chain = dataclasses.replace(run.chain, keys=Keys.fixed(config.generator))
    return dataclasses.replace(run, chain=chain), dataset


def _attacks_on_one_release(run: ResolvedRun, trials: int) -> list[_Attack]:
    """Returns attacks on a full batch, by a canary and by the worst example found."""
    games = {
        "one full-batch release": _full_batch,
        "one full-batch release, worst example found": _worst_example,
    }
    return [
        _Attack(name, name, functools.partial(_attack_release, run, make, 10 * trials))
        for name, make in games.items()
    ]


def _attacks_on_whole_run(run: ResolvedRun, trials: int) -> list[_Attack]:
    """Returns attacks on all noisy and filtered updates, and on the final parameters only."""
    name = f"{run.plan.permitted_steps} steps"
    poisson = type(run.plan.sampler) is sampling.PoissonSampler
    runs = max(trials if poisson else trials // _REPLAYED, 64)
    views: tuple[tuple[auditing.ThreatModel, optax.GradientTransformation], ...] = (
        ("white-box", run.chain.release),
        ("last-iterate", run.chain.optimizer),
    )
    return [
        _Attack(name, f"{name}, {view[0]}", functools.partial(_attack_view, run, *view, runs))
        for view in views
    ]


def _attacks_on_training(run: ResolvedRun, dataset: Dataset) -> list[_Attack]:
    """Returns an attack on one training if its data are in memory and its unit is an example."""
    if run.config.unit != "example" or not streaming.in_memory(dataset.train):
        return []
    name = f"one training of {run.config.model}"
    return [_Attack(name, name, functools.partial(_attack_training, run, dataset))]


def _attack_release(
    run: ResolvedRun, make: Callable[[ResolvedRun], auditing.Game], trials: int, **claim: Any
) -> auditing.AuditResult:
    return auditing.audit(make(run), trials=trials, **claim)


def _attack_view(
    run: ResolvedRun,
    threat_model: auditing.ThreatModel,
    transform: optax.GradientTransformation,
    trials: int,
    **claim: Any,
) -> auditing.AuditResult:
    game = auditing.canary_gradient(
        transform,
        run.chain.clip,
        jnp.zeros(_SMALL),
        run.plan.sampler,
        steps=run.plan.permitted_steps,
    )
    result = auditing.audit(game, trials=trials, threat_model=threat_model, **claim)
    return _as_stated(result, run)


def _attack_training(run: ResolvedRun, dataset: Dataset, **claim: Any) -> auditing.AuditResult:
    return _as_stated(_train(run, dataset, **claim), run)


def _full_batch(run: ResolvedRun) -> auditing.Game:
    size = run.plan.sampler.dataset_size
    chain = _one_release(run, size)
    sampler = sampling.PoissonSampler(size, size, seed=0)
    return auditing.canary_gradient(chain.release, chain.clip, jnp.zeros(_SMALL), sampler)


def _worst_example(run: ResolvedRun) -> auditing.Game:
    # Full batches, so that ε is that of one release, as above.
    chain = _one_release(run, _SEARCHED)
    return auditing.searched_canary(chain.release, chain.clip)[0]


def _as_stated(result: auditing.AuditResult, run: ResolvedRun) -> auditing.AuditResult:
    """Replaces the claim by the ε that the run states, if it is smaller.

    It is smaller if the accountant uses amplification that privacy loss distributions do not, such
    as "monte_carlo".
    """
    stated = run.plan.epsilon(run.plan.permitted_steps)
    if stated is None or stated >= result.claimed_epsilon or result.claimed is None:
        return result
    claims = result.claimed, auditing.approximate_trade_off(stated, result.delta)

    def curve(alpha: NDArray[np.float64], rest: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.maximum(*(claim.curve(alpha, rest) for claim in claims))

    both = auditing.TradeOff(", and ".join(claim.name for claim in claims), curve)
    return dataclasses.replace(result, claimed_epsilon=stated, claimed=both)


def _one_release(run: ResolvedRun, batch_size: int) -> TrainingChain:
    """Returns the chain of the run for one step at another batch size."""
    config = dataclasses.replace(run.config, batch_size=batch_size, steps=1)
    return build_chain(config, run.plan.noise_multiplier, run.chain.keys)


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


def _train(
    run: ResolvedRun, dataset: Dataset, key: jax.Array, **claim: Any
) -> auditing.AuditResult:
    """Trains once on a random subset of the canaries and scores all canaries.

    Each canary is included with probability 1/2. The attacker sees every noisy and filtered update.
    The score of a canary is the projection of the updates on the clipped gradients of the canary,
    summed over the steps.
    """
    start = time.perf_counter()
    noise_key, coin_key = jax.random.split(key)
    _, keys = seeds.keys(int(jax.random.bits(noise_key)), run.config.generator)
    chain = dataclasses.replace(run.chain, keys=keys)
    run = dataclasses.replace(run, chain=chain)
    size, steps = dataset.train_size, run.plan.permitted_steps
    count = min(_CANARIES, size)
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (count,)))
    kept = np.concatenate([np.ones(size - count, bool), included])
    rows = np.arange(size - count, size, dtype=np.int32)
    canaries = streaming.read(dataset.train, rows[:, None]), rows[:, None]
    context = Context(devices.Devices(), Phases())
    job, first = make_job(run, dataset, context)
    step, release, following = run.step, chain.release, optax.chain(*chain.following)

    def init(params: Any) -> _AuditState:
        # Data are arguments, because the compilation cache on disk stores constants of programs.
        # They are copied, because a step donates the arrays of its state.
        data, frozen = jax.tree.map(jnp.array, (canaries, job.frozen))
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
    drawn = cast(Any, _Drawn(run.plan.sampler, kept))
    job = dataclasses.replace(
        job,
        sampler=lambda opt_state: drawn,
        step=dataclasses.replace(step, optimizer=audited, key=None),
        evaluate=lambda *_: {},
        eval_every=steps,
    )
    course = Course(job, State(0, first.params, init(first.params)), context)
    course.finish()
    state = course.state.opt_state
    scores = np.asarray(state.scores)
    result = auditing.audit_scores(scores, included, state.release, run.plan.sampler, **claim)
    return dataclasses.replace(result, seconds=time.perf_counter() - start)
