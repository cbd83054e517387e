"""Tests that audits catch mistakes planted in our own step, and the published GeoDP.

Each test runs the same game twice: on the correct step and on the step with one mistake. The first
audit passes and the second fails.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import dpoptax
from dpoptax import auditing, sampling
from dpoptax._release import gaussian
from tests import games

KEY = jax.random.key(23)


def _audit(game, **kwargs):
    defaults = {"trials": 10_000, "delta": 1e-2, "claimed_epsilon": None}
    return auditing.audit(game, key=KEY, **{**defaults, **kwargs})


def _passes(result, seen=0.6):
    return seen * result.claimed_epsilon <= result.epsilon_lower_bound <= result.claimed_epsilon


def _full_batch(transform=None, grad_fn=None, *, records=8, background=-1.0):
    """One full-batch release in which the other examples oppose the canary."""
    sampler = games.poisson(records)
    transform = games.noise(sampler) if transform is None else transform
    game = auditing.canary_gradient(
        transform, games.CLIP, games.PARAMS, sampler, background=background
    )
    return game if grad_fn is None else dataclasses.replace(game, grad_fn=grad_fn(game.grad_fn))


@functools.cache
def _as_it_is():
    """Returns the audit of the correct step, for comparison with some of the mistakes."""
    return _audit(_full_batch())


@pytest.mark.parametrize("mistaken", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_catches_noise_rescaled_as_in_opacus_disk(mistaken):
    sampler, kappa, gamma = games.poisson(8), 0.7, 0.1
    c = (1 - kappa) / (kappa * gamma)
    rescaled = 1 / math.hypot(c, 1 - c)
    assert rescaled == pytest.approx(0.185, abs=1e-3)
    disk = dpoptax.disk(kappa, gamma)
    right = optax.chain(games.noise(sampler), disk)
    wrong = optax.chain(games.mislabeled(games.noise(sampler, rescaled), 1.0), disk)
    if mistaken:
        assert _audit(_full_batch(wrong)).violated
    else:
        assert _passes(_audit(_full_batch(right)))


@pytest.mark.slow
def test_trade_off_curve_catches_noise_a_fifth_too_small():
    """The trade-off curve refutes the whole claim; one threshold proves less than the claim."""
    sampler = games.poisson(8)
    effort = {"trials": 40_000, "delta": 1e-3}
    right = _audit(_full_batch(), **effort)
    wrong = _audit(_full_batch(games.mislabeled(games.noise(sampler, 0.8), 1.0)), **effort)
    assert wrong.epsilon_lower_bound < wrong.claimed_epsilon == right.claimed_epsilon
    assert wrong.violated
    assert not right.violated
    for result, least, most in ((right, 0.9, 1.0), (wrong, 1.1, 1.5)):
        one_threshold, whole_curve = (bound.epsilon for bound in result.bounds)
        assert one_threshold == result.epsilon_lower_bound
        assert least < whole_curve / result.claimed_epsilon < most


@pytest.mark.slow
def test_catches_clipping_after_averaging():
    def clip_the_mean(_):
        def grad_fn(points, batch, mask=None):
            grads = jax.vmap(jax.grad(auditing.linear_loss), (None, 0))(points.points[0], batch)
            used = jnp.ones(8) if mask is None else mask
            mean = jax.tree.map(lambda g: jnp.tensordot(used[: len(g)], g, 1)[None] / 8, grads)
            clipped, _ = dpoptax.extend.clip_per_example(games.CLIP).update(
                mean, optax.EmptyState(), points.points[0]
            )
            total = jax.tree.map(lambda g: 8 * g, clipped.sum)
            return dpoptax.extend.trust_clipped(total, clipped.clip)

        return grad_fn

    result = _audit(_full_batch(grad_fn=clip_the_mean, background=0.0))
    assert result.violated, result


@pytest.mark.slow
def test_catches_clipping_each_point_separately():
    """The canary's gradients at the two points of DiSK differ in sign half of the time."""
    sampler = games.poisson(8)

    def loss_fn(params, example):
        return example * jnp.sum(jnp.sin(1e3 * params))

    def game(grad_fn):
        tx = optax.chain(games.noise(sampler, 8.0), dpoptax.disk(0.7, 0.1))
        return auditing.Game(tx, grad_fn, jnp.zeros(1), jnp.full(1, 1e3), sampler, steps=2)

    whole = dpoptax.clipped_grad(loss_fn, games.CLIP)

    def apart(points, batch, mask=None):
        sums = [whole(dpoptax.GradientPoints((x,), (1.0,)), batch, mask).sum for x in points.points]
        total = sum(w * s for w, s in zip(points.weights, sums, strict=True))
        return dpoptax.extend.trust_clipped(total, games.CLIP)

    assert not _audit(game(whole)).violated
    result = _audit(game(apart))
    assert result.violated, result


@pytest.mark.slow
def test_catches_division_by_realized_batch_size():
    def divide(grad_fn):
        def mutated(points, batch, mask=None):
            clipped = grad_fn(points, batch, mask)
            realized = jnp.ones(()) if mask is None else jnp.maximum(jnp.sum(mask), 1)
            total = jax.tree.map(lambda s: s * (8 / realized), clipped.sum)
            return dpoptax.extend.trust_clipped(total, clipped.clip)

        return mutated

    result = _audit(_full_batch(grad_fn=divide))
    assert result.violated, result


@pytest.mark.slow
def test_catches_key_reused_over_steps():
    """Two releases with equal noise, one with the canary, differ by exactly the canary."""
    sampler = games.poisson(8, 4)
    noise = games.noise(sampler)

    def update(updates, state, params=None):
        first = games.signed(dataclasses.replace(state, count=jnp.zeros_like(state.count)))
        updates, _ = noise.update(updates, first, params)
        return updates, games.signed(dataclasses.replace(state, count=state.count + 1))

    reused = optax.GradientTransformation(noise.init, update)

    def game(tx):
        return auditing.canary_gradient(tx, games.CLIP, games.PARAMS, sampler, steps=2)

    assert _passes(_audit(game(noise)), seen=0.4)
    assert _audit(game(reused)).violated


@pytest.mark.slow
def test_catches_key_reused_over_leaves(monkeypatch):
    def one_key(tree, stddev, key, **options):
        return jax.tree.map(lambda x: x + stddev * jax.random.normal(key, x.shape), tree)

    assert _passes(_as_it_is())
    monkeypatch.setattr(gaussian, "add_noise", one_key)
    assert _audit(_full_batch()).violated


@pytest.mark.slow
def test_catches_key_that_ignores_the_state(monkeypatch):
    """Noise that is the same in every run does not protect anything."""
    right = gaussian.add_noise

    def one_for_all(tree, stddev, key, **options):
        return right(tree, stddev, jax.random.key(0), **options)

    monkeypatch.setattr(gaussian, "add_noise", one_for_all)
    assert _audit(_full_batch()).violated


@pytest.mark.slow
def test_catches_poisson_accounting_of_shuffled_batches():
    records, noise_multiplier, delta = 20, 0.8, 0.05
    claim = games.claim(noise_multiplier, 1 / records, records, delta)

    def result(sampler, trials):
        noise = games.noise(sampler, noise_multiplier)
        game = auditing.canary_gradient(
            noise, games.CLIP, games.PARAMS, sampler, steps=records, background=-1.0
        )
        return _audit(game, trials=trials, delta=delta, claimed_epsilon=claim)

    poisson = result(sampling.PoissonSampler(records, 1, seed=0), trials=300)
    assert not poisson.violated, poisson
    shuffled = result(sampling.ShuffledSampler(records, 1, seed=0), trials=6_000)
    assert shuffled.violated, (shuffled, poisson)


def _turned_around(transform):
    """Returns two neighbors with small orthogonal mean gradients; the attacker reads angles."""
    dimension, records = 20, 64
    sampler = games.poisson(records)
    rows = jnp.zeros((records, dimension))
    rows = rows.at[0, 0].set(0.7).at[-1, 0].set(-0.7).at[-1, 1].set(0.7)

    def direction(update, canary):
        del canary
        return jnp.log(jnp.abs(update[:1])) - jnp.log(jnp.abs(update[1:2]))

    grad_fn = dpoptax.clipped_grad(auditing.linear_loss, dpoptax.l2_clip(1.0))
    params = jnp.zeros(dimension)
    return auditing.Game(transform(sampler), grad_fn, params, rows, sampler, observe=direction)


@pytest.mark.slow
def test_catches_published_geodp():
    def geodp(sampler):
        return dpoptax.contrib.geodp(
            1.0, noise_multiplier=1.0, batch_size=sampler.batch_size, key=jax.random.key(0)
        )

    claim = games.claim(delta=1e-5)
    assert claim == pytest.approx(4.377, abs=1e-3)
    effort = {"trials": 40_000, "delta": 1e-5, "claimed_epsilon": claim}
    ours = _audit(_turned_around(games.noise), **effort)
    assert not ours.violated, ours
    theirs = _audit(_turned_around(geodp), **effort)
    assert theirs.violated, theirs
    assert theirs.epsilon_lower_bound > 1.4 * claim
    with pytest.raises(ValueError, match="one example can turn"):
        _audit(_turned_around(geodp), trials=64)


@pytest.mark.slow
@pytest.mark.parametrize("fixed_point", [False, True])
def test_fixed_point_hides_last_bits_of_float_noise(fixed_point):
    """The attacker counts small entries that no sum with the example can have (Mironov 2012).

    Each entry of the clipped example is c = 1/√32, a multiple of 2⁻²⁶. Where c + n is small, n is
    as large as c, so both n and the sum are multiples of 2⁻²⁶. Without c, n has finer bits.
    """
    sampler, size = games.poisson(8), 32
    tx = dpoptax.gaussian_noise(
        noise_multiplier=4.0, batch_size=8, key=jax.random.key(0), fixed_point=fixed_point
    )

    def finer(update, canary):
        del canary
        steps = 8 * update * 2.0**26  # exact, because the factors are powers of two
        small = jnp.abs(8 * update) < 0.05
        return jnp.sum(small & (steps != jnp.rint(steps)), keepdims=True, dtype=jnp.float32)

    grad_fn = dpoptax.clipped_grad(auditing.linear_loss, dpoptax.l2_clip(1.0))
    dataset = jnp.full((1, size), 1e3)
    game = auditing.Game(tx, grad_fn, jnp.zeros(size), dataset, sampler, observe=finer)
    result = _audit(game, trials=5_000)
    assert result.violated is not fixed_point, result
    if not fixed_point:
        assert result.epsilon_lower_bound > 5 * result.claimed_epsilon
