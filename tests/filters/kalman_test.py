"""Tests of Kalman gains: the recursion, its limit, and the gain estimated from releases."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpoptax
from dpoptax.filters import _kalman
from tests.helpers import filtered
from tests.oracles import disk as oracle


@pytest.mark.parametrize(
    ("w", "v", "h"), [(1.0, 0.5, 0.0), (1.0, 0.1, 0.3), (0.2, 1.0, 0.1), (5.0, 0.01, 0.0)]
)
def test_papers_recursion_converges_to_gain(w, v, h):
    _, gain = oracle.kalman_recursion(3.0, 5000, var_w=w**2, var_v=v**2, var_h=h**2)[-1]
    want = dpoptax.filters.kalman_gain(noise_stddev=w, drift_stddev=v, hessian_stddev=h)
    assert gain == pytest.approx(want, rel=1e-6)


def _track(signal, stddev, seed=0):
    """Returns the filtered gradients and the gains on a noisy signal (steps, d)."""
    tx = dpoptax.adaptive_kalman(stddev)
    return filtered(tx, signal, stddev, lambda state: state.gain[0], seed)


def _random_walk(drift, steps=300, d=4000, seed=1):
    return np.cumsum(drift * np.random.default_rng(seed).normal(size=(steps, d)), axis=0)


@pytest.mark.parametrize("drift", [0.1, 0.3, 1.0])
def test_estimates_gain_of_random_walk(drift):
    signal = _random_walk(drift)
    out, gains = _track(signal, stddev=1.0)
    want = dpoptax.filters.kalman_gain(noise_stddev=1.0, drift_stddev=drift)
    assert gains[100:].mean() == pytest.approx(want, rel=0.05)
    # The error equals the filter's own p, and is below that of any distant fixed gain.
    p, _ = oracle.kalman_recursion(0.0, 500, var_w=1.0, var_v=drift**2, var_h=0.0)[-1]
    assert np.mean((out - signal)[100:] ** 2) == pytest.approx(p, rel=0.05)


def test_averages_constant_signal():
    signal = np.broadcast_to(np.random.default_rng(0).normal(size=5000), (60, 5000))
    out, gains = _track(signal, stddev=1.0)
    np.testing.assert_allclose(gains[:5], 1 / np.arange(1, 6), rtol=0.1)
    assert np.mean((out[-1] - signal[-1]) ** 2) < 3 / 60


def test_leaves_can_have_separate_gains():
    tx = dpoptax.adaptive_kalman(1.0, per_leaf=True)
    signal = {"moving": _random_walk(1.0, 200, 3000), "still": np.zeros((200, 3000))}
    _, gains = filtered(tx, signal, 1.0, lambda state: state.gain)
    assert gains[-1, 0] > 0.5
    assert gains[-1, 1] < 0.1


@pytest.mark.parametrize("size", [100, 2000])
def test_undetectable_drift_is_not_treated_as_zero(size):
    signal = np.zeros((400, size))
    gains = np.mean([_track(signal, 1.0, seed)[1][200:].mean() for seed in range(4)])
    error = (2 / (39 * size)) ** 0.5  # a decay of 0.95 averages over 39 steps
    largest = dpoptax.filters.kalman_gain(noise_stddev=1.0, drift_stddev=(0.8 * error) ** 0.5)
    assert 0.4 < gains / largest < 1.0  # once p is too large for the signal, r is below 0


def test_mean_above_zero_matches_truncated_normal():
    estimates = np.array([-200.0, -30.0, -9.9, -3.0, 0.0, 2.0, 40.0])
    want = stats.truncnorm(-estimates / 2.0, np.inf, loc=estimates, scale=2.0).mean()
    got = _kalman._mean_above_zero(jnp.asarray(estimates, jnp.float32), jnp.full(7, 2.0))
    np.testing.assert_allclose(got, want, rtol=0.03)
    np.testing.assert_allclose(got[3:], want[3:], rtol=1e-5)
