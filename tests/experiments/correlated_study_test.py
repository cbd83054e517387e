"""Tests of correlated noise with a low-pass filter at equal ε: exact study, and digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting, matrix
from experiments import studies

pytestmark = pytest.mark.slow

STEPS, RECORDS, BATCH = 120, 1438, 64
SMOOTH = dpoptax.filters.preset("momentum")
INDEPENDENT = matrix.BandedToeplitz((1.0,))
POISSON = matrix.CyclicPoissonSampler(RECORDS, BATCH, seed=0)
GROUPS = RECORDS // BATCH
FIXED = matrix.CyclicPoissonSampler(RECORDS, RECORDS // GROUPS, seed=0, cycle_length=GROUPS)


# The values of matrix.optimal_banded_toeplitz(120, 4), without running the optimization.
FOUR = matrix.BandedToeplitz((0.6733, 0.4857, 0.4206, 0.3659))


@functools.lru_cache
def _banded(bands):
    """Nearly optimal for many bands: the closed form for the maximal error."""
    k = np.arange(1, bands)
    coefficients = np.cumprod(np.concatenate([[1.0], (2 * k - 1) / (2 * k)]))
    return matrix.BandedToeplitz(tuple(coefficients))


@functools.lru_cache
def _multiplier(strategy, sampler):
    return accounting.calibrate(
        epsilon=1.0, delta=1e-4, steps=STEPS, sampler=strategy.under(sampler)
    )


def _error(strategy, sampler, filt, curvature):
    noise = studies.iterate_noise(strategy, filt, curvature=curvature, steps=STEPS)
    return _multiplier(strategy, sampler) ** 2 * noise


@pytest.mark.parametrize("filt", [None, SMOOTH, dpoptax.filters.preset("doppler-second-order")])
def test_iterate_noise_matches_transforms(filt):
    strategy, coordinates = FOUR, 5000
    tx = optax.chain(
        dpoptax.correlated_noise(
            strategy, noise_multiplier=1.0, batch_size=1, key=jax.random.key(0)
        ),
        optax.identity() if filt is None else dpoptax.low_pass(*filt, start="zero"),
        optax.scale(-1.0),
    )

    def step(carry, _):
        x, state = carry
        total = dpoptax.extend.trust_clipped(0.2 * x, dpoptax.l2_clip(1.0))
        updates, state = tx.update(total, state)
        return (x + updates, state), None

    start = jnp.zeros(coordinates)
    (x, _), _ = jax.lax.scan(step, (start, tx.init(start)), length=60)
    want = studies.iterate_noise(strategy, filt, curvature=0.2, steps=60)
    np.testing.assert_allclose(np.var(x), want, rtol=0.08)


def test_amplified_pair_gains_little_and_only_if_flat():
    flat, steep = 0.001, 0.1
    alone = _error(INDEPENDENT, POISSON, None, flat)
    sampler = matrix.CyclicPoissonSampler(RECORDS, BATCH, seed=0, cycle_length=4)
    correlated = _error(FOUR, sampler, None, flat)
    filtered = _error(INDEPENDENT, POISSON, SMOOTH, flat)
    pair = _error(FOUR, sampler, SMOOTH, flat)
    assert pair < 0.95 * min(alone, correlated, filtered)
    assert pair > 0.7 * alone
    # If the step is not small relative to the curvature, correlation increases the error and the
    # filter compensates for it.
    assert _error(FOUR, sampler, None, steep) > 1.8 * _error(INDEPENDENT, POISSON, None, steep)
    pair, filtered = (
        _error(FOUR, sampler, SMOOTH, steep),
        _error(INDEPENDENT, POISSON, SMOOTH, steep),
    )
    assert 0.9 < pair / filtered < 1.05


@pytest.mark.parametrize("curvature", [0.001, 0.01, 0.1])
def test_pair_beats_each_alone_without_amplification(curvature):
    independent = _error(INDEPENDENT, FIXED, None, curvature)
    filtered = _error(INDEPENDENT, FIXED, SMOOTH, curvature)
    correlated = _error(_banded(GROUPS), FIXED, None, curvature)
    pair = _error(_banded(GROUPS), FIXED, SMOOTH, curvature)
    assert pair < 0.75 * correlated
    assert pair < 0.2 * filtered
    assert filtered > 0.85 * independent


@pytest.mark.slow
def test_digits_at_equal_epsilon():
    arms = {
        "fixed": studies.Arm(INDEPENDENT, FIXED, None),
        "correlated": studies.Arm(_banded(GROUPS), FIXED, None),
        "pair": studies.Arm(_banded(GROUPS), FIXED, SMOOTH),
    }
    results = studies.compare_correlated_noise(
        arms, epsilon=1.0, steps=60, learning_rates=(0.25, 0.5, 1.0), seeds=2
    )
    loss = {name: np.mean(result.training_loss) for name, result in results.items()}
    assert loss["pair"] < loss["correlated"] < loss["fixed"]
    assert results["pair"].accuracy.mean() > results["fixed"].accuracy.mean() + 5
    assert "±" in str(results["pair"])
