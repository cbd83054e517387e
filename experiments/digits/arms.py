"""Tunes an arm on several seeds at once and tests the best setting on new seeds."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import qmc
from sklearn.datasets import load_digits

import dpoptax
from experiments.spreads import mean_and_deviation

Params = dict[str, jax.Array]
Columns = tuple[np.ndarray, np.ndarray]
Settings = Mapping[str, Any]

_TUNING_SEEDS = 3


class Split(NamedTuple):
    """Splits of the digits: inputs (examples, 64) in [0, 1] and labels (examples,)."""

    public: Columns
    private: Columns
    validation: Columns
    test: Columns


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        ranges: Lowest and highest value of each tuned setting, searched on a logarithmic scale.
        plan: The private steps; None without any.
        optimizer: Returns the optax chain after the noise for the settings.
        start: Changes the initial parameters before the private steps.
    """

    ranges: Mapping[str, tuple[float, float]]
    plan: dpoptax.PrivacyPlan | None
    optimizer: Callable[[Settings], optax.GradientTransformation]
    start: Callable[[Params, Settings], Params] = lambda params, _: params


class Result(NamedTuple):
    """Result of an arm.

    Attributes:
        settings: The setting with the best mean validation accuracy over the tuning seeds.
        accuracies: Test accuracy in percent on other seeds, (seeds,).
    """

    settings: dict[str, float]
    accuracies: np.ndarray

    def __str__(self) -> str:
        return f"{mean_and_deviation(self.accuracies, 1)} %"


def split_digits(public: int = 0) -> Split:
    """Splits the digits, with `public` examples taken from the training data."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.data))
    inputs = (digits.data[order] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    ends = (public, 1297, 1547, len(labels))
    parts = [slice(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    return Split(*((inputs[part], labels[part]) for part in parts))


def initial_params(key: jax.Array, inputs: int = 64) -> Params:
    """Returns the parameters of a network with 64 hidden units."""
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (inputs, 64)) / math.sqrt(inputs),
        "hidden_bias": jnp.zeros(64),
        "head": jax.random.normal(second, (64, 10)) / 8,
        "head_bias": jnp.zeros(10),
    }


def logits(params: Params, inputs: jax.typing.ArrayLike) -> jax.Array:
    """Returns the logits of one or many inputs."""
    hidden = jnp.tanh(jnp.asarray(inputs) @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["head"] + params["head_bias"]


def loss_fn(params: Params, example: Any) -> jax.Array:
    """Returns the cross-entropy of one example, or the mean over several."""
    inputs, labels = example
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, inputs), labels)
    return jnp.mean(losses)


def measure(arm: Arm, split: Split, *, trials: int, seeds: int) -> Result:
    """Tunes an arm on some seeds and tests the best setting on `seeds` others."""
    train = _trainer(arm, split)
    drawn = qmc.Halton(len(arm.ranges), scramble=False).random(trials + 1)[1:]
    lows, highs = np.log(np.array(list(arm.ranges.values())).T)
    tried = np.exp(lows + drawn * (highs - lows)).astype(np.float32)
    tuning = np.arange(_TUNING_SEEDS)
    found = [train(dict(zip(arm.ranges, values, strict=True)), tuning)[0] for values in tried]
    best = dict(zip(arm.ranges, tried[np.argmax(np.mean(found, axis=1))], strict=True))
    _, accuracies = train(best, np.arange(_TUNING_SEEDS, _TUNING_SEEDS + seeds))
    return Result({name: float(value) for name, value in best.items()}, accuracies)


def _trainer(arm: Arm, split: Split) -> Callable[[Settings, np.ndarray], tuple[np.ndarray, ...]]:
    """Returns a function from settings and seeds to accuracies in percent."""
    grad_fn = dpoptax.clipped_grad(loss_fn, 1.0)
    noise = None if arm.plan is None else arm.plan.new_run().noise()

    def run(settings: Settings, params: Params, state: Any, draws: Any, data: Split) -> Any:
        params = arm.start(params, settings)
        optimizer = arm.optimizer(settings)

        def step(carry: Any, draw: Any) -> Any:
            params, state, rest = carry
            _, indices, mask = draw
            rows = jax.tree.map(lambda column: column[indices], data.private)
            assert noise is not None
            points = dpoptax.gradient_points(state, params)
            released, state = noise.update(grad_fn(points, rows, mask), state, params)
            updates, rest = optimizer.update(released, rest, params)
            return (optax.apply_updates(params, updates), state, rest), None

        if noise is not None:
            carry: Any = (params, state, optimizer.init(params))
            (params, *_), _ = jax.lax.scan(step, carry, draws)
        held_out = (data.validation, data.test)
        return [100 * jnp.mean(logits(params, x).argmax(-1) == y) for x, y in held_out]

    compiled = jax.jit(run)  # for one seed: compiling takes longer than training
    data = jax.tree.map(jnp.asarray, split)

    @functools.cache
    def drawn(seed: int) -> Any:
        """Returns start, noise state and batches of a seed, shared by all settings."""
        params = initial_params(jax.random.key(seed), split.private[0].shape[1])
        if arm.plan is None:
            return params, (), ()
        run = arm.plan.new_run(jax.random.key(1000 + seed))
        draws = tuple(map(np.stack, zip(*run.draws(), strict=True)))
        return params, run.noise().init(params), draws

    def train(settings: Settings, seeds: np.ndarray) -> tuple[np.ndarray, ...]:
        each = [compiled(settings, *drawn(int(seed)), data) for seed in seeds]
        validation, test = np.asarray(each).T
        return validation, test

    return train
