"""Tests the encoding of norms in the slack of a clipping bound, and the rule for the bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._gradients.clip.clip_per_example import sum_clipped
from experiments.digits import slack
from experiments.digits.arms import initial_params, loss_fn, split_digits

CLIP = slack.slack_clip(1.0)
LOW, HIGH = 0.125, 0.75


def gradients(norms):
    """Returns gradients of two leaves with the given norms, (B, 1) and (B,)."""
    norms = np.asarray(norms, np.float64)
    return {"w": jnp.float32(0.6 * norms[:, None]), "b": jnp.float32(0.8 * norms)}


def length(total):
    """Returns the norm of a sum in double precision."""
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(total)]
    return np.linalg.norm(np.concatenate(leaves))


def worst_norms(bound):
    """Returns norms at and next to every jump of the encoding, and at the ends of float32."""
    jumps = np.float32(bound) * np.array([LOW, HIGH, 1.0], np.float32)
    around = np.multiply.outer([1 - 1e-5, 1 - 1e-7, 1, 1 + 1e-7], jumps).ravel()
    return [*around.tolist(), 0.0, 1e-45, 1e-40, 1e-20, 1e20, 3e38]


@pytest.mark.parametrize("bound", [1e-9, 0.3, 1e9])
def test_every_encoding_fits_into_the_ball(bound):
    """Without a margin: an amplitude that is 0.1 % larger would leave the ball."""
    norms = worst_norms(bound)
    encoded = CLIP.encode(gradients(norms), jnp.float32(bound))
    found = [length(jax.tree.map(lambda leaf, i=i: leaf[i], encoded)) for i in range(len(norms))]
    assert max(found) <= 1 + 1e-6
    assert min(found[:3]) > 1 - 1e-4


@pytest.mark.parametrize("bound", [1e-9, 0.3, 1e9])
def test_an_example_moves_the_sum_by_at_most_one(bound):
    """With rounding, for any other examples: it takes the place of a row that adds zero."""
    rng = np.random.default_rng(0)
    others = bound * np.exp(rng.normal(size=31))
    reference = jnp.float32(bound)

    @jax.jit
    def both(grads):
        with_it, without = (
            sum_clipped(CLIP, grads, jnp.arange(32) < count, reference) for count in (32, 31)
        )
        return jax.tree.map(jnp.subtract, with_it, without)

    moved = [length(both(gradients([*others, norm]))) for norm in worst_norms(bound)]
    assert max(moved) <= 1
    assert max(moved) > 0.99


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_and_masked_examples_add_zero(bad):
    total = sum_clipped(CLIP, gradients([bad, 0.1]), np.array([True, False]), jnp.float32(1.0))
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(total))


def test_bound_follows_the_median_of_large_gradients():
    """The rule in NumPy, through `clipped_grad` and the noise stage without noise."""
    rng = np.random.default_rng(1)
    data = jnp.float32(rng.normal(size=(64, 3)) * rng.lognormal(size=(64, 1)))
    noise = dpoptax.contrib.adaptive_gaussian_noise(
        CLIP, noise_multiplier=0.0, batch_size=64, key=jax.random.key(0)
    )
    grad_fn = dpoptax.clipped_grad(lambda params, x: jnp.vdot(params, x), CLIP)
    params, bound = jnp.zeros(3), 1.0
    state = noise.init(params)
    norms = np.linalg.norm(np.asarray(data), axis=1)
    for _ in range(5):
        assert state.threshold.reference == pytest.approx(bound, rel=1e-2)
        clipped = grad_fn(dpoptax.gradient_points(state, params), data, np.ones(64, bool))
        mean, state = noise.update(clipped, state, params)
        want = np.mean(np.asarray(data) * np.minimum(1, bound / norms)[:, None], axis=0)
        np.testing.assert_allclose(mean, want, rtol=2e-2, atol=2e-2)
        low, high = (np.mean(norms <= share * bound) for share in (LOW, HIGH))
        bound *= np.exp(0.5 * ((1 + low) / 2 - high))


def test_release_costs_as_much_as_that_of_a_fixed_bound():
    plan = dpoptax.PrivacyPlan(dataset_size=200, batch_size=20, steps=10, epsilon=3.0, delta=1e-5)
    params = jnp.zeros(3)
    ledgers = [
        dpoptax.ledgers(plan.new_run().noise(clip=clip).init(params))[0]
        for clip in (CLIP, dpoptax.l2_clip(1.0))
    ]
    assert ledgers[0].mechanism == ledgers[1].mechanism
    assert CLIP.sensitivity == 1.0


@pytest.mark.parametrize("bound", [3.0, 36.0])
def test_sum_by_hand_is_that_of_clipped_grad(bound):
    inputs, labels = split_digits().private
    rows, mask = (inputs[:40], labels[:40]), np.arange(40) < 33
    params, reference = initial_params(jax.random.key(0)), jnp.float32(bound)
    points = dpoptax.GradientPoints((params,), (1.0,), reference=reference)
    found = slack.slack_sum(CLIP, points, rows, mask).sum
    want = dpoptax.clipped_grad(loss_fn, CLIP)(points, rows, mask).sum
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    assert np.all(found.count > 0) == (bound > 30)
