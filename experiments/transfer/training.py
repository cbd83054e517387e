"""Trains classifiers on frozen features, with and without privacy."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.sampling import FixedSizeSampler, PoissonSampler, Sampler
from dpoptax.training import PlainPlan, fit

DELTA = 1e-5
_CHUNK = 500  # examples that are evaluated at once

Params = dict[str, Any]
Columns = dict[str, np.ndarray]
Logits = Callable[[Params, Any, Any], jax.Array]
"""`logits(params, example, frozen)` returns the logits of one example, a row of the columns."""


class Trained(NamedTuple):
    """The result of a run.

    Attributes:
        params: The trained parameters.
        guarantee: The guarantee; None without privacy.
        seconds: Duration of the training with compilation.
    """

    params: Params
    guarantee: Guarantee | None
    seconds: float


def new_classifier(width: int, classes: int) -> Params:
    """Returns a linear layer that gives all classes the same probability."""
    return {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}


def classify(classifier: Params, features: jax.Array) -> jax.Array:
    """Returns the logits of features (..., width)."""
    return jnp.asarray(features, jnp.float32) @ classifier["kernel"] + classifier["bias"]


def make_plan(
    new_sampler: Callable[[Any], Sampler], steps: int, epsilon: float | None, also: Any = ()
) -> dpoptax.PrivacyPlan | PlainPlan:
    """Returns a plan with Poisson samples, or with batches of one size without privacy.

    Args:
        new_sampler: Returns the sampler of a class of samplers.
        steps: T.
        epsilon: ε at δ = 1e-5; None for training without privacy.
        also: Guarantees of other releases of the same data, which `epsilon` includes.
    """
    if epsilon is None:
        return PlainPlan(new_sampler(FixedSizeSampler), steps)
    sampler = new_sampler(PoissonSampler)
    return dpoptax.PrivacyPlan(
        sampler=sampler, steps=steps, epsilon=epsilon, delta=DELTA, also=also
    )


def train(
    logits: Logits,
    params: Params,
    columns: Columns,
    plan: dpoptax.PrivacyPlan | PlainPlan,
    *,
    seed: int,
    frozen: Any = None,
    **options: Any,
) -> Trained:
    """Trains on the cross-entropy of the labels; `options` are those of `fit`.

    The seed of batches and noise repeats a measurement. A run on real data draws both from the
    operating system.
    """

    def loss_fn(params: Params, example: Any, *, frozen: Any) -> jax.Array:
        found = logits(params, example, frozen)
        return optax.softmax_cross_entropy_with_integer_labels(found, example["labels"])

    begun, key = time.monotonic(), jax.random.key(seed)
    frozen = {} if frozen is None else frozen
    found = fit(loss_fn, params, columns, plan, frozen=frozen, key=key, progress=False, **options)
    return Trained(found.params, found.guarantee, time.monotonic() - begun)


def accuracy(logits: Logits, params: Params, columns: Columns, frozen: Any = None) -> float:
    """Returns the share of examples that are classified correctly, in percent."""

    def classes(params: Params, examples: Any, frozen: Any) -> jax.Array:
        return jax.vmap(logits, (None, 0, None))(params, examples, frozen).argmax(-1)

    predict, count, correct = jax.jit(classes), len(columns["labels"]), 0
    for start in range(0, count, _CHUNK):
        part = {name: column[start : start + _CHUNK] for name, column in columns.items()}
        correct += int(np.sum(predict(params, part, frozen) == part["labels"]))
    return 100 * correct / count
