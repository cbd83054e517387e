"""Audits a config: attacks its noise, filter, clip, sampler, optimizer and model."""

import dataclasses
import time
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
from dpoptax.training.run import devices, seeds
from dpoptax.training.run.chain import TrainingChain, build_chain
from dpoptax.training.run.context import Context
from dpoptax.training.run.course import Course, State
from dpoptax.training.run.phases import Phases, say
from dpoptax.training.run.privacy import make_plan
from dpoptax.training.run.records import epsilon_text
from dpoptax.training.run.resolved import ResolvedRun, resolve
from dpoptax.training.run.seeds import Keys

# Parameters of the games whose canary is a gradient; few, so that there can be many runs.
_SMALL = 2
# A sampler that cannot leave out the other records is replayed, which takes a hundred times longer.
_REPLAYED = 50
_CANARIES = 1000
# Examples of `auditing.searched_canary`.
_SEARCHED = 16

# Meanings of the bounds, by their names in the table.
_MEANINGS = {
    "one threshold": "errors of one test, by Clopper and Pearson; holds for any mechanism",
    "(ε, δ), Steinke et al.": "how many guesses about canaries were right; for any mechanism",
    "f-DP of (ε, δ)": "the same guesses by Mahloujifar et al.'s recursion; for any mechanism",
    "f-DP of the claim": "the errors or guesses against the claimed trade-off function, and those "
    "of the same mechanism with other noise: if it is of that kind, no smaller ε is true",
}


@dataclasses.dataclass(frozen=True)
class Audited:
    """One attack, and a row of the table for each of its bounds.

    Attributes:
        method: Of the config.
        name: Name of the audit.
        result: Its result.
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

    Five audits: one release on a full batch, which shows how well the attack sees; the same with
    the example that `auditing.worst_example` found instead of a plain canary, which attacks
    the clip; the whole run, with every update of noise and filter shown; the whole run, with the
    final parameters shown; and one training of the model itself, by the loop that trains configs,
    with training examples as canaries. The last is left out where the unit is a user, or where
    examples are streamed.

    The claim of a whole run is the ε that the run states by its accountant, or that of privacy loss
    distributions if it is smaller. The claim of one release is the latter.

    Args:
        config: The run; its steps are those that its budget permits.
        trials: Runs with the canary, and as many without; ten times as many of the single release.
        confidence: Of each bound.
        seed: Of the attack.
        progress: Whether each audit is named on standard error before it begins; they take minutes.

    Raises:
        ConfigError: A config that claims nothing.
        ValueError: As for training.
    """
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

    def tell(name: str) -> None:
        if progress:
            say(f"auditing {config.method.name}, {name} ...")

    # The seed is fixed, so that an audit can be repeated.
    config = dataclasses.replace(config, seed=config.seed or 0)
    dataset = config.data().load()
    # A fixed key, into which the audits of many runs fold their own.
    run = resolve(
        config,
        make_plan(config, dataset.units(config.unit)),
        num_classes=dataset.num_classes,
        keys=Keys.fixed(config.generator),
    )
    plan, chain = run.plan, run.chain
    settings: dict[str, Any] = {
        "delta": config.delta,
        "confidence": confidence,
        "key": jax.random.key(seed),
    }
    runs = trials if type(plan.sampler) is sampling.PoissonSampler else trials // _REPLAYED
    releases = {  # made when it is their turn: what cannot be audited is refused before a search
        "one full-batch release": _full_batch,
        "one full-batch release, worst example found": _worst_example,
    }
    rows = []
    for name, make in releases.items():
        tell(name)
        result = auditing.audit(make(run), trials=10 * trials, **settings)
        rows.append(Audited(config.method.name, name, result))
    views: tuple[tuple[auditing.ThreatModel, optax.GradientTransformation], ...] = (
        ("white-box", chain.release),
        ("last-iterate", chain.optimizer),
    )
    for threat_model, transform in views:
        name = f"{plan.permitted_steps} steps"
        tell(f"{name}, {threat_model}")
        game = auditing.canary_gradient(
            transform,
            chain.clip,
            jnp.zeros(_SMALL),
            plan.sampler,
            steps=plan.permitted_steps,
        )
        result = auditing.audit(game, trials=max(runs, 64), threat_model=threat_model, **settings)
        rows.append(Audited(config.method.name, name, _as_stated(result, run)))
    if streaming.in_memory(dataset.train) and config.unit == "example":
        name = f"one training of {config.model}"
        tell(name)
        result = _train(run, dataset, **settings)
        rows.append(Audited(config.method.name, name, _as_stated(result, run)))
    return rows


def table(rows: list[Audited]) -> str:
    """Returns the bounds of the audits as a Markdown table."""
    lines = [
        "| method | audited | threat model | trials | claimed ε | audited ε ≥ | by | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found = row.result
        for i, bound in enumerate(found.bounds):
            refuted = bound.epsilon > found.claimed_epsilon
            verdict = " **VIOLATED**" if refuted else ""
            lines.append(
                f"| {row.method} | {row.name} | {found.threat_model} | {found.trials} | "
                f"{epsilon_text(found.claimed_epsilon)} | "
                f"{epsilon_text(bound.epsilon, lower=True)}{verdict} | {bound.method} | "
                f"{f'{found.seconds:.1f}' if i == 0 else ''} |"
            )
    return "\n".join(lines)


def notes(rows: list[Audited]) -> list[str]:
    """Explains the bounds of the table, names refuted claims, and says how much canaries vary."""
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
                f"{low:.3f} to {high:.3f} in 95 % of bootstrap resamples of the canaries: how "
                "much it varies over canaries, which proves nothing; the bounds above do."
            )
    return lines


def _full_batch(run: ResolvedRun) -> auditing.Game:
    records = run.plan.sampler.dataset_size
    chain = _one_release(run, records)
    sampler = sampling.PoissonSampler(records, records, seed=0)
    return auditing.canary_gradient(chain.release, chain.clip, jnp.zeros(_SMALL), sampler)


def _worst_example(run: ResolvedRun) -> auditing.Game:
    # Full batches of the search's few examples: epsilon is that of one release, as above.
    chain = _one_release(run, _SEARCHED)
    return auditing.searched_canary(chain.release, chain.clip)[0]


def _as_stated(result: auditing.AuditResult, run: ResolvedRun) -> auditing.AuditResult:
    """The result of a whole run, whose claim is also the ε that the run itself states.

    By privacy loss distributions the same ledgers claim more where the config's accountant prices
    who takes part by chance, as "monte_carlo" does.
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
    """The run's chain, with its noise, for a single step on a batch of another size."""
    config = dataclasses.replace(run.config, batch_size=batch_size, steps=1)
    return build_chain(config, run.plan.noise_multiplier, Keys.fixed(config.generator))


class _AuditState(NamedTuple):
    """State of an audited chain: of its parts, the canaries, the constants, and the scores."""

    release: Any
    following: Any
    canaries: Any
    frozen: Any
    scores: jax.Array


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Draws a sampler's batches without the records whose coin fell so."""

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
    """Takes the run's own steps, with canaries in its data, and scores each release.

    The attacker sees every output of noise and filter, and projects it on the contribution that
    each canary would have made to the sum of that step.
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
        # Data are arguments, since the compilation cache on disk holds the constants of a program.
        # Copies, since a step takes the arrays of its state.
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
    job = dataclasses.replace(
        job,
        plan=dataclasses.replace(run.plan, sampler=cast(Any, _Drawn(run.plan.sampler, kept))),
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
