"""Audits one training run of a task, with some of its examples as canaries."""

import dataclasses
import functools
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
from dpoptax.training.run.feeding import Inputs
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
    scores: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AuditedStep(TrainingStep):
    """A step that also scores canaries by its release."""

    release: optax.GradientTransformation

    def __call__(
        self,
        params: Any,
        opt_state: Any,
        inputs: Inputs,
        frozen: Any,
        *,
        mesh: jax.sharding.Mesh | None = None,
    ) -> tuple[Any, Any]:
        states = opt_state.release, opt_state.following
        gradient = functools.partial(self.gradient(frozen, mesh), params, states)
        released, after = self.release.update(gradient(inputs), opt_state.release, params)

        def score(canary: Any) -> jax.Array:
            example, row = canary
            alone = gradient(Inputs(example, jnp.ones(1, bool), row, inputs.key))
            return jnp.sum(auditing.leaf_projections(released, alone.decode(alone.sum)))

        scores = opt_state.scores + jax.lax.map(score, opt_state.canaries, batch_size=64)
        updates, moved = self.task.optimizer.update(released, opt_state.following, params)
        state = _AuditState(after, moved, opt_state.canaries, scores)
        return optax.apply_updates(params, updates), state


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
    """A run of some records, whose steps score canaries."""

    kept: np.ndarray

    def sampler(self, opt_state: Any) -> Any:
        return _Drawn(seeded(self.task.plan.sampler, self.key), self.kept)

    @property
    def release(self) -> optax.GradientTransformation:
        return cast(optax.GradientTransformation, self.noise())

    def step(self) -> TrainingStep:
        whole = super().step()
        return _AuditedStep(whole.task, whole.optimizer, release=self.release)


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
    params, frozen = (inputs.on_devices(n, getattr(task, n), None) for n in ("params", "frozen"))
    task = dataclasses.replace(task, params=params, frozen=frozen, evaluate=None, eval_every=steps)
    attacked = _Attacked(task, key=noise_key, kept=kept)
    # Data are arguments, because the compilation cache on disk stores constants of programs. They
    # are copied, because a step donates the arrays of its state.
    states = attacked.release.init(params), task.optimizer.init(params)
    state = _AuditState(*states, jax.tree.map(jnp.array, canaries), jnp.zeros(count))
    loop = TrainingLoop(attacked, State(0, params, state), Context(Announcer()), steps=steps)
    loop.finish()
    state = loop.state.opt_state
    scores, sampler = np.asarray(state.scores), seeded(task.plan.sampler, noise_key)
    result = auditing.audit_scores(scores, included, state.release, sampler, **claim)
    return dataclasses.replace(result, seconds=time.perf_counter() - start)
