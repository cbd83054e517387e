"""Tests of claimed trade-off functions against closed forms, and of observed ones against them."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import spatial, special, stats

from dpoptax import accounting, auditing
from dpoptax._pricing.trade_off_functions import gaussian_trade_off
from dpoptax.auditing import _result
from tests import games
from tests.helpers import after_releases

RATES = np.linspace(1e-4, 1 - 1e-4, 501)


def _after_steps(sampler, noise_multiplier, steps):
    """Returns the optimizer's state after a number of releases."""
    return after_releases(games.noise(sampler, noise_multiplier), jnp.zeros(2), steps)


def test_sampled_claim_is_below_both_threshold_tests():
    """Checks threshold tests of (1 − q) N(0, 1) + q N(1/σ, 1) against N(0, 1), both ways."""
    sampler, q = games.poisson(64, 16), 0.25
    claimed = _result.claimed_family(_after_steps(sampler, 2.0, 1), sampler).trade_off(1.0)
    at = np.linspace(-8, 9, 2001)
    without, within = stats.norm.sf(at), (1 - q) * stats.norm.sf(at) + q * stats.norm.sf(at - 1 / 2)
    added, removed = (without, 1 - within), (1 - within, without)
    for false_positive, false_negative in (added, removed):
        assert np.all(claimed(false_positive) <= false_negative + 1e-9)
    # The claim is close to the convex hull of the two curves, which is the largest possible claim.
    corner = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    points = np.concatenate([np.stack(added, 1), np.stack(removed, 1), corner])
    hull = points[spatial.ConvexHull(points).vertices]
    lower = hull[(hull.sum(1) <= 1 + 1e-9)]
    lower = lower[np.argsort(lower[:, 0])]
    exact = np.interp(RATES, lower[:, 0], lower[:, 1])
    np.testing.assert_allclose(claimed(RATES), exact, atol=3e-3)


def test_less_noise_gives_lower_trade_off():
    sampler = games.poisson(64, 16)
    state = _after_steps(sampler, 16.0, 2)
    family = _result.claimed_family(state, sampler)
    curves = [family.trade_off(less)(RATES) for less in (0.5, 1.0, 2.0)]
    assert np.all(curves[0] >= curves[1])
    assert np.all(curves[1] >= curves[2])
    assert family.epsilon(1.0, 1e-3) == accounting.guarantee(state, sampler).epsilon(1e-3)
    half = _after_steps(sampler, 32.0, 2)
    assert family.epsilon(0.5, 1e-3) == accounting.guarantee(half, sampler).epsilon(1e-3)
    assert family.epsilon(0.0, 1e-3) == 0


@pytest.mark.parametrize(
    "f",
    [
        auditing.gaussian_trade_off(0.0),
        auditing.gaussian_trade_off(1.3),
        auditing.approximate_trade_off(1.0, 1e-2),
        auditing.approximate_trade_off([0.0, 2.0, np.inf], [0.4, 1e-3, 0.0]),
    ],
    ids=lambda f: f.name,
)
def test_trade_off_is_convex_falling_and_self_inverse(f):
    values = f(RATES)
    assert np.all(np.diff(values) <= 0)
    assert np.all(np.diff(values, 2) >= -1e-12)
    assert np.all(values <= 1 - RATES + 1e-12)
    inside = (values > 0) & (values < f(0.0))
    np.testing.assert_allclose(f(values[inside]), RATES[inside], atol=1e-9)


@pytest.mark.parametrize(
    "mu", [0.5, 2.0, *(pytest.param(mu, marks=pytest.mark.slow) for mu in (10.0, 20.0))]
)
def test_tiny_false_positive_rates_are_not_rounded_to_zero(mu):
    """A claim with little noise stays far below 1 even where 1 − α rounds to 1 in float64."""
    alpha = np.array([0.0, 1e-300, 1e-20, 5e-17, 1e-15, 1e-10])
    exact = special.ndtr(-special.ndtri(alpha) - mu)
    np.testing.assert_allclose(gaussian_trade_off(mu)(alpha), exact, rtol=1e-12)
    claimed = accounting.planned_guarantee(
        noise_multiplier=1 / mu, sampling_probability=1.0, steps=1
    ).trade_off
    assert np.all(claimed(alpha) <= exact * (1 + 1e-9))
    assert claimed(0.0) <= 1.0


@pytest.mark.parametrize("rate", [-0.1, 1.1, np.nan, [0.5, 2.0]])
def test_refuses_rates_outside_unit_interval(rate):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        gaussian_trade_off(1.0)(rate)


def test_infinite_epsilon_claims_nothing():
    assert np.all(auditing.approximate_trade_off(np.inf, 1e-5)(RATES) == 0)


def test_bands_match_clopper_pearson():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(1, size=200), rng.normal(size=300)
    thresholds = [-9.0, 0.3, 1.0, 9.0]
    curve = auditing.trade_off_curve(inside, outside, thresholds, confidence=0.9)
    for k, t in enumerate(thresholds):
        for rates, bounds, hits in (
            (curve.false_negative_rates, curve.false_negative_bounds, inside < t),
            (curve.false_positive_rates, curve.false_positive_bounds, outside >= t),
        ):
            # Four limits per threshold share the failure probability, and two limits form an
            # interval.
            exact = stats.binomtest(int(hits.sum()), hits.size).proportion_ci(
                1 - 0.1 / (2 * len(thresholds)), "exact"
            )
            assert rates[k] == pytest.approx(hits.mean())
            np.testing.assert_allclose(bounds[:, k], exact, atol=1e-12)


def test_bands_have_stated_coverage():
    rng = np.random.default_rng(1)
    thresholds = np.linspace(-1, 2, 8)
    held = 0
    for _ in range(200):
        curve = auditing.trade_off_curve(
            rng.normal(1, size=400), rng.normal(size=400), thresholds, confidence=0.9
        )
        true = stats.norm.sf(thresholds), stats.norm.cdf(thresholds - 1)
        bounds = curve.false_positive_bounds, curve.false_negative_bounds
        held += all(
            np.all((low <= rate) & (rate <= high))
            for rate, (low, high) in zip(true, bounds, strict=True)
        )
    assert held >= 180


def test_curve_keeps_true_claim_and_refutes_false_one():
    rng = np.random.default_rng(2)
    inside, outside = rng.normal(1, size=50_000), rng.normal(size=50_000)
    curve = auditing.trade_off_curve(inside, outside, np.linspace(-1.5, 2.5, 24))
    assert not curve.refutes(auditing.gaussian_trade_off(1.0))
    assert curve.refutes(auditing.gaussian_trade_off(0.9))
    assert 0.9 < _result.gaussian_family().refuted(curve.refutes) < 1.0
    # With the two samples exchanged, the runs refute nothing.
    turned = auditing.trade_off_curve(outside, inside, np.linspace(-1.5, 2.5, 24))
    assert _result.gaussian_family().refuted(turned.refutes) == 0


def test_refuses_bad_confidence():
    with pytest.raises(ValueError, match=r"`confidence` must .* got 1\.0"):
        auditing.trade_off_curve([1.0], [0.0], [0.5], confidence=1.0)
    with pytest.raises(ValueError, match="`inside`, .* got 0, 1 and 1"):
        auditing.trade_off_curve([], [0.0], [0.5])
