"""Trains a head, and LoRA below it, on frozen features, with and without privacy."""

import dataclasses
import functools
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


@dataclasses.dataclass(frozen=True)
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
        freeze_a: Whether A stays at its random start (FFA-LoRA).
        after_noise: Returns a transformation of released gradients for the standard deviation of
            their noise.
    """

    steps: int
    batch: int
    rate: float
    clip: float = 1.0
    lora_rate: float = 0.0
    lora_clip: float = 1.0
    freeze_a: bool = False
    after_noise: Callable[[float], optax.GradientTransformation] | None = None


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
    params, fixed = _split_factors(start) if settings.freeze_a else (start, {})
    gradient = _gradient(problem.encoder, settings.clip, settings.lora_clip, plan is not None)
    chain = _chain(problem, settings, plan, seed)
    update = jax.jit(chain.update)
    state, average = chain.init(params), params
    begun = time.monotonic()
    for t, parts in enumerate(_batches(problem, settings, plan, seed)):
        sums = [gradient(params, fixed, problem.frozen, state, *part) for part in parts]
        total = _mean(*sums) if plan is None else _accumulate(*sums)
        updates, state = update(total, state, params)
        params = optax.apply_updates(params, updates)
        if t == 0:
            jax.block_until_ready(params)
            begun = time.monotonic()
        count = t + 1 - settings.steps // 2
        if count >= 1:
            average = jax.tree.map(lambda a, x, n=count: a + (x - a) / n, average, params)
    jax.block_until_ready(params)
    seconds = (time.monotonic() - begun) / max(settings.steps - 1, 1)
    guarantee = None if plan is None else plan.guarantee(state)
    return Trained(_joined(params, fixed), _joined(average, fixed), guarantee, seconds)


def make_plan(
    problem: Problem, settings: Settings, noise_multiplier: float, *, seed: int, also: Any = ()
) -> dpoptax.PrivacyPlan:
    """Returns a plan for Poisson samples of owners, after other releases."""
    table = UserTable(problem.owners, records_per_user=1, seed=seed)
    kind = dpoptax.sampling.PoissonSampler
    sampler = table.sampler(kind, batch_size=settings.batch, seed=seed)
    return dpoptax.PrivacyPlan(
        sampler=sampler,
        steps=settings.steps,
        noise_multiplier=noise_multiplier,
        delta=DELTA,
        also=also,
    )


@functools.cache
def noise_multipliers(owners: int, parts: tuple[tuple[Settings, float], ...]) -> tuple[float, ...]:
    """Returns σ of several runs one after the other.

    Args:
        owners: Number of owners.
        parts: The settings of each run, and the ε that all runs up to it may spend together.
    """
    found: list[float] = []
    also: list[Any] = []
    for settings, epsilon in parts:
        plan = dpoptax.PrivacyPlan(
            dataset_size=owners,
            batch_size=settings.batch,
            steps=settings.steps,
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

    def one(params: Params, example: Any, frozen: Any) -> jax.Array:
        return logits(problem.encoder, params, example, frozen).argmax(-1)

    predict = jax.jit(jax.vmap(one, in_axes=(None, 0, None)))
    count = len(problem.test["labels"])
    correct = 0
    for start in range(0, count, _CHUNK):
        part = {name: column[start : start + _CHUNK] for name, column in problem.test.items()}
        correct += int(np.sum(predict(params, part, problem.frozen) == part["labels"]))
    return 100 * correct / count


@functools.cache
def _gradient(
    encoder: LastProjection | None, clip: float, lora_clip: float, private: bool
) -> Callable[..., Any]:
    """Returns the compiled gradient of a part of a batch: a clipped sum, or a mean."""
    clips: Any = clip if encoder is None else _clips(clip, lora_clip)

    def one(params: Params, fixed: Params, frozen: Any, example: Any) -> jax.Array:
        found = logits(encoder, _joined(params, fixed), example, frozen)
        return optax.softmax_cross_entropy_with_integer_labels(found, example["labels"])

    def clipped(params: Any, fixed: Any, frozen: Any, state: Any, rows: Any, mask: Any) -> Any:
        loss = lambda params, example: one(params, fixed, frozen, example)  # noqa: E731
        points = dpoptax.gradient_points(state, params)
        return dpoptax.clipped_grad(loss, clips)(points, rows, mask)

    def mean(params: Any, fixed: Any, frozen: Any, state: Any, rows: Any, mask: Any) -> Any:
        def total(params: Params) -> jax.Array:
            return jnp.mean(
                jax.vmap(one, in_axes=(None, None, None, 0))(params, fixed, frozen, rows)
            )

        return jax.grad(total)(params)

    return jax.jit(clipped if private else mean)


_accumulate = jax.jit(dpoptax.accumulate)


@jax.jit
def _mean(*parts: Params) -> Params:
    return jax.tree.map(lambda *x: sum(x) / len(x), *parts)


def _clips(clip: float, lora_clip: float) -> dpoptax.Clip:
    return dpoptax.per_layer_clip({"head": clip, "lora": lora_clip})


def _chain(
    problem: Problem, settings: Settings, plan: dpoptax.PrivacyPlan | None, seed: int
) -> optax.GradientTransformation:
    schedule = optax.cosine_decay_schedule(1.0, settings.steps)
    rates = {"head": settings.rate, "lora": settings.lora_rate}

    def scaled(updates: Params, _: Any = None) -> Params:
        return {
            name: jax.tree.map(lambda x, r=rates[name]: r * x, u) for name, u in updates.items()
        }

    optimizer = optax.chain(optax.adam(schedule), optax.stateless(scaled))
    if plan is None:
        return optimizer
    stages = [plan.noise(jax.random.key(seed))]
    if settings.after_noise is not None:
        clip = (
            settings.clip if problem.encoder is None else _clips(settings.clip, settings.lora_clip)
        )
        noise: Any = plan.noise_multiplier
        stddev = dpoptax.extend.noise_stddev(
            clip, noise_multiplier=noise, batch_size=settings.batch
        )
        stages.append(settings.after_noise(stddev))
    return optax.chain(*stages, optimizer)


def _batches(
    problem: Problem, settings: Settings, plan: dpoptax.PrivacyPlan | None, seed: int
) -> Iterator[list[tuple[Columns, np.ndarray]]]:
    """Yields each step's drawn texts, one for each owner, in parts of equal size."""
    table = UserTable(problem.owners, records_per_user=1, seed=seed)
    owners = np.unique(problem.owners)
    first = np.searchsorted(problem.owners, owners)
    counts = np.diff([*first, len(problem.owners)])
    rng = np.random.default_rng(seed)
    size = settings.batch if problem.encoder is None else min(_PART, settings.batch)
    for t in range(settings.steps):
        if plan is None:
            drawn = rng.choice(len(owners), settings.batch, replace=False)
            records = first[drawn] + rng.integers(0, counts[drawn])
        else:
            sample = table.sample(plan.sampler, t)
            records = sample.records[sample.mask, 0]
        parts = []
        for start in range(0, max(len(records), 1), size):
            part = records[start : start + size]
            mask = np.arange(size) < len(part)
            rows = np.pad(part, (0, size - len(part)))
            parts.append(({name: c[rows] for name, c in problem.train.items()}, mask))
        yield parts


def _split_factors(params: Params) -> tuple[Params, Params]:
    """Returns the parameters without LoRA's A, and those of A."""
    if not isinstance(params, dict):
        return params, {}
    kept, fixed = {}, {}
    for name, child in params.items():
        if name == "lora_a":
            fixed[name] = child
        else:
            kept[name], inner = _split_factors(child)
            if inner:
                fixed[name] = inner
    return kept, fixed


def _joined(params: Params, fixed: Params) -> Params:
    """Undoes `_split_factors`."""
    if not isinstance(params, dict) or not fixed:
        return params
    both = {name: _joined(child, fixed.get(name, {})) for name, child in params.items()}
    return {**{name: child for name, child in fixed.items() if name not in both}, **both}
