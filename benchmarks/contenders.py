"""Builds the JAX contenders: an optimizer and a gradient function for each."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import dpoptax
from benchmarks.models import Problem

L2_CLIP_NORM = 1.0
LEARNING_RATE = 0.1
NOISE_MULTIPLIER = 1.0
# The optimizer state of these methods keeps the last parameters. JAX pairs donated arrays with
# results in order. If the step returns the state first, the state takes over the array of the
# parameters and nothing is copied.
STATE_FIRST = ("disk", "dp-pmlf")


class Setting(NamedTuple):
    """Options of a contender: fields of `variants.Variant` and of the cell.

    Without a `microbatch_size`, dpoptax takes its default, and the others the whole batch.
    """

    batch_size: int
    microbatch_size: int | None
    algorithm: str
    noise: bool
    points: int


def non_private(problem: Problem, setting: Setting):
    """Averages gradients over the whole batch, or adds those of micro-batches in a `lax.scan`.

    Convolutions that XLA computes slowly in loops are rewritten, as for dpoptax.
    """

    def mean_gradient(params, batch):
        def gradient_sum(batch, mask):
            losses = jax.vmap(problem.loss_fn, (None, 0))
            return jax.grad(lambda params: jnp.sum(losses(params, batch), where=mask))(params), None

        def add(total, part):
            sums = dpoptax.extend.in_microbatches(gradient_sum, None)
            return optax.tree.add(total, sums(part, jnp.ones(size, bool))[0]), None

        size = setting.microbatch_size or setting.batch_size
        if size == setting.batch_size:
            total, _ = gradient_sum(batch, jnp.ones(size, bool))
        else:
            parts = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), batch)
            total, _ = jax.lax.scan(add, optax.tree.zeros_like(params), parts)
        return optax.tree.scale(1.0 / setting.batch_size, total)

    return optax.sgd(LEARNING_RATE), lambda opt_state, params, batch: mean_gradient(params, batch)


def optax_contrib(problem: Problem, setting: Setting):
    """Aggregates with `optax.contrib.differentially_private_aggregate`."""
    key = jax.random.key(0)
    aggregate = optax.contrib.differentially_private_aggregate(L2_CLIP_NORM, NOISE_MULTIPLIER, key)
    gradients = jax.vmap(jax.grad(problem.loss_fn), (None, 0))
    tx = optax.chain(aggregate, optax.sgd(LEARNING_RATE))
    return tx, lambda opt_state, params, batch: gradients(params, batch)


def jax_privacy_clipped(problem: Problem, setting: Setting):
    """Uses `jax_privacy.clipped_grad` with the library's Gaussian privatizer."""
    import jax_privacy
    from jax_privacy import noise_addition

    clipped = jax_privacy.clipped_grad(
        problem.loss_fn,
        l2_clip_norm=L2_CLIP_NORM,
        normalize_by=setting.batch_size,
        keep_batch_dim=False,
        microbatch_size=setting.microbatch_size,
    )
    privatizer = noise_addition.gaussian_privatizer(
        stddev=NOISE_MULTIPLIER * L2_CLIP_NORM / setting.batch_size, prng_key=jax.random.key(0)
    )
    tx = optax.chain(privatizer, optax.sgd(LEARNING_RATE))
    return tx, lambda opt_state, params, batch: clipped(params, batch)


def dpoptax_clipped(
    problem: Problem, setting: Setting, *, method: str, precision: str | None = None
):
    """Uses `dpoptax.clipped_grad` with the given `method` and `precision`."""
    grad_fn = dpoptax.clipped_grad(
        problem.loss_fn,
        dpoptax.l2_clip(L2_CLIP_NORM),
        microbatch_size=setting.microbatch_size,
        method=method,
        precision=precision,
    )
    noise = dpoptax.gaussian_noise(
        noise_multiplier=NOISE_MULTIPLIER if setting.noise else 0.0,
        batch_size=setting.batch_size,
        key=jax.random.key(0),
    )
    tx = optax.chain(noise, *_filters(setting), optax.sgd(LEARNING_RATE))

    def gradient(opt_state, params, batch):
        return grad_fn(dpoptax.gradient_points(opt_state, params), batch)

    return tx, gradient


def _filters(setting):
    b, a = (1 / 11, 1 / 11), (-9 / 11,)
    if setting.algorithm == "dp-sgd":
        return []
    if setting.algorithm == "doppler":
        return [dpoptax.doppler(b=b, a=a)]
    if setting.algorithm == "disk":
        return [dpoptax.disk(kappa=0.7, gamma=0.5)]
    return [dpoptax.pmlf(length=setting.points, beta=0.9, b=b, a=a)]


CONTENDERS: dict[str, Callable[[Problem, Setting], tuple[Any, Callable]]] = {
    "non-private": non_private,
    "optax.contrib": optax_contrib,
    "jax_privacy": jax_privacy_clipped,
    "dpoptax vmap": partial(dpoptax_clipped, method="vmap"),
    "dpoptax auto": partial(dpoptax_clipped, method="auto"),
    "dpoptax float32": partial(dpoptax_clipped, method="auto", precision="float32"),
    "dpoptax recompute": partial(dpoptax_clipped, method="recompute"),
}


def make_step(library: str, problem: Problem, setting: Setting):
    """Returns a contender's jitted step and its optimizer state.

    The step gets parameters, state, batch, and `problem.frozen` if there is any. It donates
    parameters and state. It returns (parameters, state), or (state, parameters)
    for the algorithms of `STATE_FIRST`. `params_and_state` restores the order.
    """
    tx, _ = CONTENDERS[library](problem, setting)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch, frozen=None):
        loss_fn = problem.loss_fn if frozen is None else partial(problem.loss_fn, frozen)
        _, gradient = CONTENDERS[library](problem._replace(loss_fn=loss_fn), setting)
        updates, opt_state = tx.update(gradient(opt_state, params, batch), opt_state, params)
        params = optax.apply_updates(params, updates)
        return (opt_state, params) if setting.algorithm in STATE_FIRST else (params, opt_state)

    return step, tx.init(jax.tree.map(jnp.copy, problem.params))


def params_and_state(results, algorithm: str):
    """Returns the results of a step with the parameters first."""
    return results[::-1] if algorithm in STATE_FIRST else results
