"""Defines games that the audit tests share: few parameters, full batches, every method."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

import dpoptax
from dpoptax import auditing, sampling
from dpoptax._release import ledger
from dpoptax.contrib._geodp import to_hyperspherical
from tests.helpers import planned_epsilon

PARAMS = {"w": jnp.zeros(2), "b": jnp.zeros(2)}
CLIP = dpoptax.l2_clip(0.5)
SECOND_ORDER = dpoptax.filters.preset("doppler-second-order")

FILTERS = {
    "DP-SGD": lambda: optax.identity(),
    "DOPPLER": lambda: dpoptax.doppler(*SECOND_ORDER),
    "DiSK": lambda: dpoptax.disk(0.7, 0.1),
    "adaptive Kalman": lambda: dpoptax.adaptive_kalman(0.1),
    "DP-PMLF": lambda: dpoptax.pmlf(3, 0.5, *SECOND_ORDER),
}
CLIPS = {
    "automatic_clip": dpoptax.automatic_clip,
    "psac_clip": dpoptax.contrib.psac_clip,
    "normalized_clip": dpoptax.normalized_clip,
}


def poisson(records=64, batch_size=None):
    """Returns a Poisson sampler, with full batches by default."""
    return sampling.PoissonSampler(records, records if batch_size is None else batch_size, seed=0)


def canary_gradients(transform, clip, size, sampler, *, steps=1):
    """Returns a game for `audit_one_run`: the gradient of example i is a long i-th unit vector."""
    dataset = 1e3 * clip.sensitivity * jnp.eye(sampler.dataset_size, size)
    grad_fn = dpoptax.clipped_grad(auditing.linear_loss, clip)
    return auditing.Game(transform, grad_fn, jnp.zeros(size), dataset, sampler, steps)


def noise(sampler, noise_multiplier=1.0):
    """Returns the noise stage for a sampler."""
    return dpoptax.gaussian_noise(
        noise_multiplier=noise_multiplier,
        batch_size=sampler.batch_size,
        key=jax.random.key(0),
    )


def method(name, sampler, noise_multiplier=1.0):
    """Returns the chain of noise and method."""
    return optax.chain(noise(sampler, noise_multiplier), FILTERS[name]())


@functools.cache
def claim(noise_multiplier=1.0, probability=1.0, steps=1, delta=1e-5):
    """Returns ε from the accountant."""
    return planned_epsilon(
        noise_multiplier=noise_multiplier,
        sampling_probability=probability,
        steps=steps,
        delta=delta,
    )


def signed(state):
    """Returns the state with a matching imprint, so that the ledger's checks miss the mistake."""
    return ledger.replace_key(state, state.key)


def mislabeled(noise, claimed):
    """Returns a noise stage whose ledger claims a different noise multiplier than it uses."""

    def relabel(state, noise_multiplier):
        mechanism = dataclasses.replace(state.mechanism, noise_multiplier=noise_multiplier)
        imprint = ledger.begin(mechanism, state.key, None).imprint
        return signed(dataclasses.replace(state, mechanism=mechanism, imprint=imprint))

    true = noise.init(None).mechanism.noise_multiplier

    def update(updates, state, params=None):
        updates, state = noise.update(updates, relabel(state, true), params)
        return updates, relabel(state, claimed)

    return optax.GradientTransformation(lambda params: relabel(noise.init(params), claimed), update)


def hyperspherical(noise_multiplier=1.0):
    """Returns the proven GeoDP game with full batches.

    The other examples are parallel to the canary. A mean of magnitude near 0 would lose its
    direction, and the attacker reads the direction.
    """
    sampler = poisson(30)
    game = auditing.canary_gradient(
        noise(sampler, noise_multiplier),
        dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=0.5),
        PARAMS,
        sampler,
        background=1.0,
    )

    def coordinates(update, canary):
        del canary
        norm, angles = to_hyperspherical(jnp.concatenate(jax.tree.leaves(update)))
        return jnp.append(angles, norm)

    return auditing.Game(
        game.transform, game.grad_fn, game.params, game.dataset, sampler, observe=coordinates
    )


def skip_games(monkeypatch):
    """Skips the audits of many runs, which use neither the model nor the data of a config."""
    from dpoptax.training import task_audit  # needs packages that the library does not

    given = auditing.AuditResult(1.0, 0.5, 1e-5, 0.999, 100, "white-box", "none", 0.0)
    monkeypatch.setattr(auditing, "audit", lambda *args, **options: given)
    monkeypatch.setattr(task_audit, "_worst_example", lambda run: None)
