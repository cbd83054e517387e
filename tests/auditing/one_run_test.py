"""Tests of one-run audits against exact probabilities and simulations."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpoptax
from dpoptax import auditing
from dpoptax.auditing import _result
from dpoptax.auditing._audit_one_run import one_run_bound
from dpoptax.auditing._replay import one_run
from tests import games


def _bound(scores, included, *, delta=1e-5, confidence=0.95, **options):
    return one_run_bound(scores, included, delta=delta, confidence=confidence, **options)


def _gaussian_scores(rng, mu, canaries):
    included = rng.random(canaries) < 0.5
    return rng.normal(size=canaries) + mu * included, included


def test_bounds_keep_claim_and_catch_missing_noise():
    """Uses a synthetic mechanism: one coordinate per canary with unit noise, plus 1 if included."""
    rng = np.random.default_rng(0)
    epsilon = _result.gaussian_family().epsilon(1.0, 1e-5)
    # A bound above ε has a probability of at most 0.05. A third of the noise exceeds it in every
    # run.
    for _ in range(8):
        honest, broken = (_gaussian_scores(rng, mu, 1000) for mu in (1.0, 3.0))
        seen = _bound(*honest, gaussian=True)
        assert 0.4 * epsilon < seen <= epsilon
        assert _bound(*honest) <= seen
        assert _bound(*broken, gaussian=True) > epsilon


@pytest.mark.parametrize("epsilon", [0.5, 2.0, 4.0])
def test_randomized_response_keeps_claim(epsilon):
    """Uses Steinke et al.'s ideal case: randomized response for every bit."""
    rng = np.random.default_rng(1)
    bounds = []
    for _ in range(30):
        included = rng.random(2000) < 0.5
        kept = rng.random(2000) < 1 / (1 + math.exp(-epsilon))
        bounds.append(_bound(np.where(kept, included, ~included) * 1.0, included, delta=1e-12))
    # At most 1.5 of 30 are expected to fail; more than 7 fail with probability below 10⁻⁴.
    assert np.sum(np.array(bounds) > epsilon) <= 7
    assert np.median(bounds) > 0.75 * epsilon - 0.1


@pytest.mark.slow
def test_claimed_epsilon_is_not_refuted_by_gaussian_bound():
    """Signs are randomized response: ε = log(p/(1 − p)) at any δ, unlike for a Gaussian."""
    sampler, right = games.poisson(1_000), stats.norm.cdf(1.0)
    signs = optax.stateless(lambda updates, _: jnp.sign(updates - 0.5 / 1_000))
    tx = optax.chain(games.noise(sampler, 0.5), signs)
    game = games.canary_gradients(tx, dpoptax.l2_clip(1.0), 1_000, sampler)
    claim = {"delta": 1e-10, "claimed_epsilon": math.log(right / (1 - right)) + 0.01}
    result = auditing.audit_one_run(game, key=jax.random.key(0), **claim)
    assert 0.5 < result.epsilon_lower_bound <= result.claimed_epsilon, result
    assert not result.violated, result
    assert [bound.assumes for bound in result.bounds] == ["nothing"]
    included = np.random.default_rng(0).random(1_000) < 0.5
    scores, _ = one_run(game, "white-box", jax.random.key(1), included)
    gaussian = one_run_bound(scores, included, delta=1e-10, confidence=0.999, gaussian=True)
    assert gaussian > result.claimed_epsilon


@pytest.mark.slow
def test_claimed_curve_catches_a_third_of_the_noise():
    sampler = games.poisson(2_000)
    honest, broken = (
        auditing.audit_one_run(
            games.canary_gradients(tx, dpoptax.l2_clip(1.0), 2_000, sampler),
            key=jax.random.key(3),
        )
        for tx in (
            games.noise(sampler),
            games.mislabeled(games.noise(sampler, 1 / 3), 1.0),
        )
    )
    assert not honest.violated, honest
    assert broken.violated, broken
    any_mechanism, claimed = honest.bounds
    assert any_mechanism.epsilon > 0.3
    assert 1.0 < claimed.epsilon <= honest.claimed_epsilon
    assert claimed.epsilon == honest.epsilon_lower_bound
    # The (ε, δ) bound detects less of the missing noise.
    any_mechanism, claimed = broken.bounds
    assert any_mechanism.epsilon < claimed.epsilon


def test_guesses_are_highest_and_lowest_scores():
    included = np.r_[np.zeros(50, bool), np.ones(50, bool)]
    assert _bound(np.arange(100.0), included) > 2
    assert _bound(-np.arange(100.0), included) == 0


def _losses(rng, kind, canaries):
    uniform = rng.random(canaries)
    if kind == "bfloat16":
        return -np.asarray(jnp.asarray(2 + uniform, jnp.bfloat16), np.float32)
    return np.floor(kind * uniform)


@pytest.mark.parametrize("kind", [1, 2, 11, "bfloat16"])
@pytest.mark.parametrize("members_last", [True, False])
def test_ties_accuse_no_noise(kind, members_last):
    """Scores of pure noise rarely have a bound above ε = 0.01 in any order of the canaries."""
    rng = np.random.default_rng(5)
    runs, failures = 200, 0
    for _ in range(runs):
        included = np.sort(rng.random(256) < 0.5)[:: 1 if members_last else -1]
        failures += _bound(_losses(rng, kind, 256), included) > 0.01
    assert stats.binom.sf(failures - 1, runs, 0.05) > 1e-3


def test_binary_scores_still_prove_a_bound():
    """All members are classified correctly, and half of the others."""
    rng = np.random.default_rng(1)
    included = rng.random(1000) < 0.5
    scores = included | (rng.random(1000) < 0.5)
    assert _bound(scores, included) > 0.5


def test_refuses_bad_claims():
    with pytest.raises(ValueError, match=r"`mu` must .* got -1\.0"):
        auditing.gaussian_trade_off(-1.0)
    with pytest.raises(ValueError, match="`delta` in .* got "):
        auditing.approximate_trade_off(1.0, 2.0)
