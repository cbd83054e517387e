"""Trains a linear probe, or the last block of a network, with and without privacy."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.training import fit
from experiments.data.pooled_features import scale_to_length_1
from experiments.models import efficientnet_lite
from experiments.models.efficientnet_lite import Network
from experiments.transfer.image_inputs import ImageProblem

DELTA = 1e-5
_CHUNK = 500  # examples that are evaluated at once
_MICROBATCH = 50  # examples whose gradients through the block are computed at once

Params = dict[str, Any]
Logits = Callable[[Params, jax.Array, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class ProbeSettings:
    """Settings of a run with Adam and cosine decay.

    Attributes:
        rate: The learning rate.
        clip: C.
        batch: B, the expected batch size.
        steps: T.
    """

    rate: float
    clip: float = 1.0
    batch: int = 4096
    steps: int = 100


class ProbeResult(NamedTuple):
    """The result of a run.

    Attributes:
        params: The trained parameters.
        accuracy: Share of held-out images that are classified correctly, in percent.
        seconds: Duration of the training with compilation.
        guarantee: The guarantee; None without privacy.
    """

    params: Params
    accuracy: float
    seconds: float
    guarantee: Guarantee | None


def new_classifier(width: int, classes: int) -> Params:
    """Returns a linear layer that gives all classes the same probability."""
    return {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}


def probe_logits(params: Params, inputs: jax.Array, frozen: Any = None) -> jax.Array:
    """Returns the logits of features (..., width)."""
    return (
        inputs.astype(jnp.float32) @ params["classifier"]["kernel"] + params["classifier"]["bias"]
    )


def trained_layers(network: Network) -> Params:
    """Returns the parameters of the last block and of the layer after it that are trained.

    These are all of its kernels for single pixels, with their biases. The depthwise kernels are
    frozen, and so are the statistics that are folded into all kernels.
    """
    block = network["blocks"][-1]
    return {"expand": block["expand"], "project": block["project"], "head": network["head"]}


def block_logits(params: Params, inputs: jax.Array, frozen: Network) -> jax.Array:
    """Returns the logits of activations (copies, height, width, channels) of one image."""
    layers = params["layers"]
    block = {
        "expand": layers["expand"],
        "depthwise": frozen["blocks"][-1]["depthwise"],
        "project": layers["project"],
    }
    network = {"blocks": (*frozen["blocks"][:-1], block), "head": layers["head"]}
    hidden = inputs.astype(jnp.float32)
    features = efficientnet_lite.tail(network, hidden, len(efficientnet_lite.STRIDES) - 1)
    return probe_logits(params, scale_to_length_1(features.mean(0)))


def train_probe(
    problem: ImageProblem,
    settings: ProbeSettings,
    params: Params,
    *,
    epsilon: float | None,
    seed: int,
    logits: Logits = probe_logits,
    frozen: Any = None,
    also: Any = (),
) -> ProbeResult:
    """Trains on the training images and measures the accuracy on the held-out ones.

    Args:
        problem: The images.
        settings: The settings.
        params: The initial parameters.
        epsilon: ε of the plan with δ = 1e-5; None for training without privacy.
        seed: Seed of batches and noise, to repeat a measurement. A run on real data draws both
            from the operating system.
        logits: The model.
        frozen: Its arrays that are not trained.
        also: Guarantees of other releases on the same images, which `epsilon` includes.
    """

    def loss(params: Params, example: Any, *, frozen: Any) -> jax.Array:
        found = logits(params, example["inputs"], frozen)
        return optax.softmax_cross_entropy_with_integer_labels(found, example["labels"])

    optimizer = optax.adam(optax.cosine_decay_schedule(settings.rate, settings.steps))
    begun, guarantee = time.monotonic(), None
    if epsilon is None:
        params = _train_plainly(problem, settings, params, loss, optimizer, frozen, seed)
    else:
        plan = dpoptax.PrivacyPlan(
            dataset_size=len(problem.train["labels"]),
            batch_size=settings.batch,
            steps=settings.steps,
            epsilon=epsilon,
            delta=DELTA,
            also=also,
        )
        found = fit(
            loss,
            params,
            problem.train,
            plan,
            optimizer=optimizer,
            clip=settings.clip,
            frozen={} if frozen is None else frozen,
            microbatch_size=None if logits is probe_logits else _MICROBATCH,
            key=jax.random.key(seed),
            progress=False,
        )
        params, guarantee = found.params, found.guarantee
    seconds = time.monotonic() - begun
    return ProbeResult(params, accuracy(problem, params, logits, frozen), seconds, guarantee)


def accuracy(problem: ImageProblem, params: Params, logits: Logits, frozen: Any) -> float:
    """Returns the share of held-out images that are classified correctly, in percent."""

    def classes(params: Params, inputs: jax.Array, frozen: Any) -> jax.Array:
        return jax.vmap(logits, (None, 0, None))(params, inputs, frozen).argmax(-1)

    predict, labels, correct = jax.jit(classes), problem.test["labels"], 0
    for start in range(0, len(labels), _CHUNK):
        rows = slice(start, start + _CHUNK)
        found = predict(params, problem.test["inputs"][rows], frozen)
        correct += int(np.sum(found == labels[rows]))
    return 100 * correct / len(labels)


def _train_plainly(
    problem: ImageProblem,
    settings: ProbeSettings,
    params: Params,
    loss: Callable[..., jax.Array],
    optimizer: optax.GradientTransformation,
    frozen: Any,
    seed: int,
) -> Params:
    """Trains with the mean gradients of random batches of B examples, unclipped."""

    @jax.jit
    def step(params: Params, state: Any, batch: Any, frozen: Any) -> tuple[Params, Any]:
        def mean(params: Params) -> jax.Array:
            return jax.vmap(lambda example: loss(params, example, frozen=frozen))(batch).mean()

        updates, state = optimizer.update(jax.grad(mean)(params), state, params)
        return optax.apply_updates(params, updates), state

    rng, state = np.random.default_rng(seed), optimizer.init(params)
    for _ in range(settings.steps):
        rows = rng.choice(len(problem.train["labels"]), settings.batch, replace=False)
        batch = {name: column[rows] for name, column in problem.train.items()}
        params, state = step(params, state, batch, frozen)
    return params
