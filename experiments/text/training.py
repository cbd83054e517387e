"""Trains a head, and LoRA below it, on frozen features, with and without privacy."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.users import UserTable
from experiments.text.encoder import LastProjection

Params = dict[str, Any]
Columns = dict[str, np.ndarray]
DELTA = 1e-5
_CHUNK = 200  # texts that are evaluated at once
_PART = 256  # texts whose gradients are computed at once


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Training and held-out texts as features.

    Attributes:
        train: Columns of the training texts: "inputs" and "labels", and for LoRA "sums" and "used".
        owners: The owner of each training text.
        test: Columns of the held-out texts.
        classes: Number of classes.
        encoder: The projection that LoRA corrects. None: inputs are the encoder's output.
        frozen: The published weights of the encoder.
    """

    train: Columns
    owners: np.ndarray
    test: Columns
    classes: int
    encoder: LastProjection | None = None
    frozen: Any = ()

    @property
    def width(self) -> int:
        """The width of the last projection's outputs, for LoRA."""
        return int(self.train["sums"].shape[-1])

    @property
    def directions(self) -> int:
        """The number of directions of the last projection's inputs, for LoRA."""
        return int(self.train["inputs"].shape[-1])

    def holding_out(self, share: float) -> "Problem":
        """Returns the problem with a share of the owners as held-out texts."""
        names = np.unique(self.owners)
        drawn = np.random.default_rng(0).permutation(names)[: round(share * len(names))]
        return self._split(np.isin(self.owners, drawn))

    def subset(self, count: int) -> "Problem":
        """Returns the problem with `count` random owners; the held-out texts stay."""
        names = np.unique(self.owners)
        drawn = np.random.default_rng(1).permutation(names)[:count]
        return dataclasses.replace(self._split(~np.isin(self.owners, drawn)), test=self.test)

    def _split(self, out: np.ndarray) -> "Problem":
        train = {name: column[~out] for name, column in self.train.items()}
        test = {name: column[out] for name, column in self.train.items()}
        return dataclasses.replace(self, train=train, owners=self.owners[~out], test=test)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a training run.

    Attributes:
        steps: T.
        batch: B, the expected owners in a step.
        rate: Learning rate of the head, for Adam with cosine decay.
        clip: C of the head.
        lora_rate: Learning rate of LoRA's factors.
        lora_clip: C of LoRA's factors.
    """

    steps: int
    batch: int
    rate: float
    clip: float = 1.0
    lora_rate: float = 0.0
    lora_clip: float = 1.0


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
        params: Parameters after the last step.
        average: Mean of the parameters after each of the last half of the steps.
        guarantee: The guarantee of the run; None without privacy.
        seconds: Seconds of a step, without compilation.
    """

    params: Params
    average: Params
    guarantee: Any
    seconds: float


def start_head(width: int, classes: int) -> Params:
    """Returns a head that gives all classes the same probability."""
    return {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}


def logits(
    encoder: LastProjection | None, params: Params, example: Mapping[str, Any], frozen: Any
) -> jax.Array:
    """Returns the logits (classes,) of one text."""
    hidden = jnp.asarray(example["inputs"], jnp.float32)
    if encoder is not None:
        variables = {"params": params["lora"], "frozen": frozen}
        given = hidden, example["sums"], example["used"]
        hidden = jnp.asarray(encoder.apply(variables, *given))
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


def train(
    problem: Problem,
    settings: Settings,
    start: Params,
    *,
    seed: int,
    plan: dpoptax.PrivacyPlan | None = None,
) -> Trained:
    """Trains with Adam, privately if a plan is given.

    Each drawn owner contributes one of its texts, drawn at random.

    Args:
        problem: The texts.
        settings: The settings.
        start: Initial parameters: "head", and "lora" if the problem has an encoder.
        seed: Seed of batches and noise, to repeat a measurement. A run on real data draws both
            from the operating system.
        plan: The plan from `make_plan`; None for training without privacy.
    """
    gradient = _gradient(problem.encoder, settings.clip, settings.lora_clip, plan is not None)
    rates = {"head": settings.rate, "lora": settings.lora_rate}
    run = None if plan is None else plan.new_run(jax.random.key(seed))
    stages = [] if run is None else [run.noise()]
    state = _chain(stages, settings, rates).init(start)
    update = _update(dataclasses.replace(settings, rate=0.0, lora_rate=0.0), plan)
    params = average = start
    begun = time.monotonic()
    for t, parts in enumerate(_batches(problem, settings, run, seed)):
        points = params if plan is None else dpoptax.gradient_points(state, params)
        sums = [gradient(points, problem.frozen, *part) for part in parts]
        total = _mean(settings.batch, *sums) if plan is None else _accumulate(*sums)
        weight = 1 / max(t + 1 - settings.steps // 2, 1)
        params, state, average = update(rates, total, state, params, average, weight)
        if t == 0:
            jax.block_until_ready(params)
            begun = time.monotonic()
    jax.block_until_ready(params)
    seconds = (time.monotonic() - begun) / max(settings.steps - 1, 1)
    guarantee = None if run is None else run.guarantee(state)
    return Trained(params, average, guarantee, seconds)


def make_plan(
    problem: Problem, settings: Settings, noise_multiplier: float, *, also: Any = ()
) -> dpoptax.PrivacyPlan:
    """Returns a plan for Poisson samples of owners, after other releases."""
    table = UserTable(problem.owners, records_per_user=1, seed=0)
    return dpoptax.PrivacyPlan(
        sampler=table.sampler(dpoptax.sampling.PoissonSampler, batch_size=settings.batch),
        steps=settings.steps,
        noise_multiplier=noise_multiplier,
        delta=DELTA,
        also=also,
    )


@functools.cache
def noise_multipliers(owners: int, parts: tuple[tuple[int, int, float], ...]) -> tuple[float, ...]:
    """Returns σ of several runs one after the other.

    Args:
        owners: Number of owners.
        parts: For each run B, T and the ε that all runs up to it may spend together.
    """
    found: list[float] = []
    also: list[Any] = []
    for batch, steps, epsilon in parts:
        plan = dpoptax.PrivacyPlan(
            dataset_size=owners,
            batch_size=batch,
            steps=steps,
            epsilon=epsilon,
            delta=DELTA,
            also=also,
        )
        noise: Any = plan.noise_multiplier
        found.append(noise)
        also = [plan.guarantee()]
    return tuple(found)


def accuracy(problem: Problem, params: Params) -> float:
    """Returns the share of held-out texts that are classified correctly, in percent."""
    predict = _predict(problem.encoder)
    count = len(problem.test["labels"])
    correct = 0
    for start in range(0, count, _CHUNK):
        part = {name: column[start : start + _CHUNK] for name, column in problem.test.items()}
        correct += int(np.sum(predict(params, part, problem.frozen) == part["labels"]))
    return 100 * correct / count


@functools.cache
def _predict(encoder: LastProjection | None) -> Callable[..., Any]:
    """Returns the compiled classes of a part of the texts."""

    def one(params: Params, example: Any, frozen: Any) -> jax.Array:
        return logits(encoder, params, example, frozen).argmax(-1)

    return jax.jit(jax.vmap(one, in_axes=(None, 0, None)))


@functools.cache
def _gradient(
    encoder: LastProjection | None, clip: float, lora_clip: float, private: bool
) -> Callable[..., Any]:
    """Returns the compiled gradient of a part of a batch: a clipped sum, or a sum."""
    clips: Any = clip if encoder is None else _clips(clip, lora_clip)

    def one(params: Params, frozen: Any, example: Any) -> jax.Array:
        found = logits(encoder, params, example, frozen)
        return optax.softmax_cross_entropy_with_integer_labels(found, example["labels"])

    def clipped(points: Any, frozen: Any, rows: Any, mask: Any) -> Any:
        loss = lambda params, example: one(params, frozen, example)  # noqa: E731
        return dpoptax.clipped_grad(loss, clips)(points, rows, mask)

    def summed(params: Any, frozen: Any, rows: Any, mask: Any) -> Any:
        def total(params: Params, rows: Any, mask: Any) -> jax.Array:
            losses = jax.vmap(one, in_axes=(None, None, 0))(params, frozen, rows)
            return jnp.sum(losses, where=mask)

        def add(sums: Any, block: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.grad(total)(params, *block)), None

        # Blocks that fit into the cache take a third of the time.
        size = len(mask) if encoder is None else math.gcd(len(mask), 32)
        blocks = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (rows, mask))
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), blocks)[0]

    return jax.jit(clipped if private else summed)


_accumulate = jax.jit(dpoptax.accumulate)


@jax.jit
def _mean(batch: int, *parts: Params) -> Params:
    return jax.tree.map(lambda *x: sum(x) / batch, *parts)


def _clips(clip: float, lora_clip: float) -> dpoptax.Clip:
    return dpoptax.per_layer_clip({"head": clip, "lora": lora_clip})


@functools.cache
def _update(settings: Settings, plan: dpoptax.PrivacyPlan | None) -> Callable[..., Any]:
    """Returns the compiled update of parameters and their average, for all runs of a plan."""
    # The state of each run has its own key; that of the transform is not read.
    stages = [] if plan is None else [plan.new_run().noise()]

    def update(
        rates: Any, total: Any, state: Any, params: Params, average: Params, weight: Any
    ) -> tuple[Params, Any, Params]:
        updates, state = _chain(stages, settings, rates).update(total, state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, x: a + weight * (x - a), average, params)
        return params, state, average

    return jax.jit(update)


def _chain(
    stages: list[optax.GradientTransformation], settings: Settings, rates: Mapping[str, Any]
) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(1.0, settings.steps)

    def scaled(updates: Params, _: Any = None) -> Params:
        return {
            name: jax.tree.map(lambda x, r=rates[name]: r * x, u) for name, u in updates.items()
        }

    optimizer = optax.chain(optax.adam(schedule), optax.stateless(scaled))
    return optax.chain(*stages, optimizer)


def _batches(
    problem: Problem, settings: Settings, run: dpoptax.PrivateRun | None, seed: int
) -> Iterator[list[tuple[Columns, np.ndarray]]]:
    """Yields each step's drawn texts, one for each owner, in parts of equal size."""
    size = settings.batch if problem.encoder is None else min(_PART, settings.batch)
    if run is None:
        drawn = _drawn_plainly(problem.owners, settings, seed)
    else:
        drawn = _drawn_privately(problem.owners, run, seed)
    for records in drawn:
        parts = []
        for start in range(0, max(len(records), 1), size):
            part = records[start : start + size]
            mask = np.arange(size) < len(part)
            rows = np.pad(part, (0, size - len(part)))
            parts.append(({name: c[rows] for name, c in problem.train.items()}, mask))
        yield parts


def _drawn_privately(
    owners: np.ndarray, run: dpoptax.PrivateRun, seed: int
) -> Iterator[np.ndarray]:
    """Yields the texts of each step, one of each owner that the run draws."""
    table = UserTable(owners, records_per_user=1, seed=seed)
    for batch in run.batches(np.arange(len(owners)), users=table):
        texts, _ = batch.examples
        yield texts[batch.mask, 0]


def _drawn_plainly(owners: np.ndarray, settings: Settings, seed: int) -> Iterator[np.ndarray]:
    """Yields the texts of each step, one of each of `batch` owners."""
    names, first, counts = np.unique(owners, return_index=True, return_counts=True)
    rng = np.random.default_rng(seed)
    for _ in range(settings.steps):
        drawn = rng.choice(len(names), settings.batch, replace=False)
        yield first[drawn] + rng.integers(0, counts[drawn])
