"""Tests the price of batches of a fixed size against closed forms and exact mechanisms."""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from dpoptax.sampling import FixedSizeSampler
from tests.helpers import planned_epsilon

DELTA = 1e-5


def _price(size, batch_size, sigma, steps, delta=DELTA, accountant="pld"):
    return planned_epsilon(
        noise_multiplier=sigma,
        sampler=FixedSizeSampler(size, batch_size, seed=0),
        steps=steps,
        accountant=accountant,
        delta=delta,
    )


def _gaussian_delta(epsilon, mu):
    """δ(ε) of two unit Gaussians at distance μ."""
    growth = math.exp(epsilon) if epsilon < 700 else math.inf
    below = stats.norm.logcdf(-mu / 2 - epsilon / mu)
    return stats.norm.cdf(mu / 2 - epsilon / mu) - (growth * math.exp(below) if below > -700 else 0)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.98])
@pytest.mark.parametrize("sigma", [0.7, 3.0])
def test_one_step_has_the_closed_form(share, sigma):
    """δ'(log(1 + q (e^ε − 1))) = q δ(ε), with sums at a distance of 2C."""
    epsilon = optimize.brentq(lambda e: share * _gaussian_delta(e, 2 / sigma) - DELTA, 1e-9, 200)
    right = math.log1p(share * math.expm1(epsilon))
    assert _price(1000, int(1000 * share), sigma, 1) == pytest.approx(right, rel=1e-3)


@pytest.mark.usefixtures("coarse_prices")
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("size", "sigma", "steps"), [(50, 4.0, 20), (1000, 10.0, 50), (200, 2.0, 1)]
)
def test_price_increases_with_the_batch_up_to_that_of_full_batches(size, sigma, steps, accountant):
    sizes = [size // 50, size // 2, size - size // 10, size - 1, size]
    prices = [_price(size, b, sigma, steps, accountant=accountant) for b in sizes]
    assert np.all(np.diff(prices) > 0)
    assert prices[-1] - prices[-2] < 0.05 * prices[-1]  # no jump for the last record
    mu = 2 * math.sqrt(steps) / sigma
    full = optimize.brentq(lambda e: _gaussian_delta(e, mu) - DELTA, 1e-9, 300)
    assert prices[-1] >= full * (1 - 1e-9)
    if accountant == "pld":
        assert prices[-1] == pytest.approx(full, rel=1e-3)


def _densities(gradients, batch_size, sigma, grid):
    """The density of the noisy sum of a uniformly random batch of scalar gradients."""
    sums = [sum(batch) for batch in itertools.combinations(gradients, batch_size)]
    return np.mean([stats.norm.pdf(grid, total, sigma) for total in sums], axis=0)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_data_set_exceeds_the_price(batch_size, accountant):
    """Two steps, exactly, for all gradients of four records, one of which is replaced."""
    sigma, size = 1.0, 4
    grid, width = np.linspace(-12, 12, 601, retstep=True)
    stated = {
        delta: _price(size, batch_size, sigma, 2, delta, accountant) for delta in (0.2, 1e-2, 1e-4)
    }
    worst = dict.fromkeys(stated, 0.0)
    for others in itertools.combinations_with_replacement((-1.0, 0.0, 1.0), size - 1):
        for pair in itertools.permutations((-1.0, 0.0, 1.0), 2):
            with_, instead = (_densities((x, *others), batch_size, sigma, grid) for x in pair)
            for delta, epsilon in stated.items():
                excess = np.outer(with_, with_) - math.exp(epsilon) * np.outer(instead, instead)
                worst[delta] = max(worst[delta], np.maximum(excess, 0).sum() * width**2)
    for delta in stated:
        assert worst[delta] <= delta * (1 + 1e-3)  # the quadrature; some data attain the bound
        if accountant == "pld":
            assert worst[delta] > 0.9 * delta
