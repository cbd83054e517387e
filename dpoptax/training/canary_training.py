"""Audits one training run of a task, with some of its examples as canaries."""

import dataclasses
import time
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dpoptax import auditing, sampling
from dpoptax.runs import seeded
from dpoptax.training.data import streaming
from dpoptax.training.run import inputs
from dpoptax.training.run.announcer import Announcer
from dpoptax.training.run.context import Context
from dpoptax.training.run.program import RunProgram
from dpoptax.training.run.step import TrainingStep
from dpoptax.training.run.training_loop import State, TrainingLoop
from dpoptax.training.task import Task

_CANARIES = 1000


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Attacked(RunProgram):
    """A run of some records, with an optimizer that scores canaries."""

    kept: np.ndarray
    audited: optax.GradientTransformation

    def sampler(self, opt_state: Any) -> Any:
        return _Drawn(seeded(self.task.plan.sampler, self.key), self.kept)

    def step(self) -> TrainingStep:
        return dataclasses.replace(super().step(), optimizer=self.audited)


def train_with_canaries(task: Task, key: jax.Array, **claim: Any) -> auditing.AuditResult:
    """Trains once on a random subset of the canaries and scores all canaries.

    Each canary is included with probability 1/2. The attacker sees every noisy gradient. The score
    of a canary is the projection of these on the clipped gradients of the canary, summed over the
    steps.
    """
    start = time.perf_counter()
    noise_key, coin_key = jax.random.split(key)
    steps = task.plan.steps
    size = streaming.source_size(task.data)
    count = min(_CANARIES, size)
    included = np.asarray(jax.random.bernoulli(coin_key, 0.5, (count,)))
    kept = np.concatenate([np.ones(size - count, bool), included])
    rows = np.arange(size - count, size, dtype=np.int32)
    canaries = streaming.read(task.data, rows[:, None]), rows[:, None]
    params = inputs.on_devices("params", task.params, None)
    task = dataclasses.replace(task, params=params, evaluate=None, eval_every=steps)
    program = RunProgram(task, key=noise_key)
    release = cast(optax.GradientTransformation, program.noise())
    step, following = program.step(), optax.chain(*program.following())

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
    sampler = seeded(task.plan.sampler, noise_key)
    attacked = _Attacked(task, key=noise_key, kept=kept, audited=audited)
    first = State(0, params, init(params))
    loop = TrainingLoop(attacked, first, Context(Announcer()), steps=steps)
    loop.finish()
    state = loop.state.opt_state
    scores = np.asarray(state.scores)
    result = auditing.audit_scores(scores, included, state.release, sampler, **claim)
    return dataclasses.replace(result, seconds=time.perf_counter() - start)
