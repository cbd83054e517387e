"""Tests of μ and of the trade-off function of a run, which lies above that of a Gaussian."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpoptax
from dpoptax import accounting, sampling
from dpoptax._pricing import trade_off_functions
from tests.helpers import after_releases

RATES = np.array([1e-3, 0.01, 0.1, 0.3, 0.7])


def after_steps(sampler, noise_multiplier, steps):
    tx = dpoptax.gaussian_noise(
        noise_multiplier=noise_multiplier, batch_size=sampler.batch_size, key=jax.random.key(0)
    )
    return after_releases(tx, jnp.zeros(1), steps)


@pytest.mark.parametrize(("sigma", "steps"), [(2.0, 1), (5.0, 4)])
def test_full_batches_are_gaussian(sigma, steps):
    sampler = sampling.PoissonSampler(100, 100, seed=0)
    state, mu = after_steps(sampler, sigma, steps), math.sqrt(steps) / sigma
    made = accounting.guarantee(state, sampler)
    found = made.gdp_mu(1e-6)
    assert mu * (1 - 1e-4) <= found <= 1.002 * mu
    exact = stats.norm.cdf(stats.norm.ppf(1 - RATES) - mu)
    curve = made.trade_off(RATES)
    assert np.all(curve <= exact + 1e-12)
    np.testing.assert_allclose(curve, exact, atol=3e-3)
    planned = accounting.planned_guarantee(noise_multiplier=sigma, steps=steps, sampler=sampler)
    assert planned.gdp_mu(1e-6) == found
    np.testing.assert_array_equal(planned.trade_off(RATES), curve)


def test_stated_mu_bounds_all_epsilons_and_trade_offs():
    sampler, delta = sampling.PoissonSampler(1000, 50, seed=0), 1e-5
    made = accounting.guarantee(after_steps(sampler, 4.0, 30), sampler)
    mu = made.gdp_mu(delta)
    deltas = np.geomspace(2e-5, 0.01, 4)
    # The number of records in an event is unknown, so some of these δ are above 1/N.
    alone = accounting.Guarantee(made.event)
    epsilons = np.array([alone.epsilon(d) for d in deltas.tolist()])
    # The run spends these δ at these ε. The Gaussian together with δ must cover them.
    assert np.all(deltas * (1 - 1e-6) <= trade_off_functions._gaussian_deltas(mu, epsilons) + delta)
    curve = made.trade_off(RATES)
    assert np.all(curve >= stats.norm.cdf(stats.norm.ppf(1 - RATES) - mu) - delta - 3e-3)
    # Infinitely many small steps reach the μ of the central limit theorem; these steps exceed it.
    assert mu > 0.05 * math.sqrt(30 * math.expm1(1 / 4.0**2))
    smaller = trade_off_functions._gaussian_deltas(0.9 * mu, epsilons)
    assert np.any(smaller + delta < deltas), "a smaller μ would also hold"


def test_mu_is_zero_without_releases_and_infinite_without_noise():
    sampler = sampling.PoissonSampler(100, 10, seed=0)
    assert accounting.guarantee(after_steps(sampler, 1.0, 0), sampler).gdp_mu(1e-5) == 0.0
    without_noise = accounting.guarantee(after_steps(sampler, 0.0, 1), sampler)
    assert without_noise.gdp_mu(1e-5) == math.inf
    np.testing.assert_array_equal(without_noise.trade_off(RATES), 0.0)


def test_mu_includes_other_events():
    sampler = sampling.PoissonSampler(100, 100, seed=0)
    state, also = after_steps(sampler, 2.0, 1), [dp_accounting.GaussianDpEvent(2.0)]
    both = accounting.guarantee(state, sampler, also=also).gdp_mu(1e-6)
    assert both == pytest.approx(math.sqrt(2) / 2, rel=0.002)


def test_overflow_of_batches_is_charged_to_delta():
    sampler = sampling.RandomAllocationSampler(64, 8, seed=0, max_batch_size=12)
    state = after_steps(sampler, 2.0, 8)
    assert accounting.guarantee(state, sampler).gdp_mu(1e-7) == math.inf
    with pytest.raises(ValueError, match="the sampler's largest batch is full.*Pass a larger"):
        accounting.guarantee(state, sampler).epsilon(1e-7)
