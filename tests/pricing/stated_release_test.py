"""Tests of releases that state only (ε, δ), against their closed form."""

import math

import dp_accounting as dpa
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import common
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

import dpoptax
from dpoptax import accounting
from dpoptax.accounting import Guarantee, PrivacyEvent, StatedDpEvent
from tests.helpers import divergences

DELTA = 1e-5
STATED = [(0.5, 1e-6), (0.50003, 0.0), (3, 1e-7), (1e-3, 1e-6), (0.0, 1e-6), (12.0, 2e-6)]


def alone(epsilon, stated):
    """Returns δ of randomized response with an infinite loss of probability δ₀."""
    epsilon_0, delta_0 = stated
    rest = max(0.0, math.exp(epsilon_0) - math.exp(epsilon)) / (1 + math.exp(epsilon_0))
    return delta_0 + (1 - delta_0) * rest


def beside_gaussian(epsilon, stated, mu):
    """Returns δ of a stated release and a Gaussian one, whose losses are independent."""
    epsilon_0, delta_0 = stated

    def gaussian(x):
        return stats.norm.cdf(mu / 2 - x / mu) - math.exp(x) * stats.norm.cdf(-mu / 2 - x / mu)

    share = 1 / (1 + math.exp(-epsilon_0))
    finite = share * gaussian(epsilon - epsilon_0) + (1 - share) * gaussian(epsilon + epsilon_0)
    return delta_0 + (1 - delta_0) * finite


@pytest.mark.parametrize("stated", STATED)
def test_alone_is_what_it_states(stated):
    found = Guarantee(StatedDpEvent(*stated))
    for delta in (max(stated[1], 1e-9), 1e-4, 0.01, 0.2):
        price = found.epsilon(delta)
        assert stated[1] <= delta
        assert alone(price, stated) <= delta * (1 + 1e-12)
        assert alone(max(0.0, price - 1.1e-4), stated) >= delta or price == 0
    for epsilon in (0.0, stated[0] / 2, stated[0]):
        exact = alone(epsilon, stated)
        assert exact * (1 - 1e-9) <= found.delta(epsilon) <= exact + 1e-4 * math.exp(epsilon)
    assert 1 - found.trade_off(0.01) == pytest.approx(
        min(
            stated[1] + 0.01 * math.exp(stated[0]),
            1 - math.exp(-stated[0]) * (0.99 - stated[1]),
        ),
        rel=2e-3,
    )


@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_beside_a_gaussian(stated, mu):
    releases = [PrivacyEvent(dpa.GaussianDpEvent(1 / mu)), StatedDpEvent(*stated)]
    found = Guarantee(accounting.selection.all_of(releases))
    for delta in (DELTA, 1e-3):
        price = found.epsilon(delta)
        assert beside_gaussian(price, stated, mu) <= delta
        assert beside_gaussian(price - 1e-3, stated, mu) > delta
    by_rdp = Guarantee(found.event, accountant="rdp").epsilon(DELTA)
    assert found.epsilon(DELTA) <= by_rdp + 1e-3 <= found.epsilon(DELTA) * 1.5 + 0.2


def test_many_releases_are_the_optimal_composition():
    """Compares with theorem 3.3 of Kairouz, Oh and Viswanath, 2015."""
    epsilon_0, delta_0, k = 0.2, 1e-7, 30
    event = dpa.SelfComposedDpEvent(StatedDpEvent(epsilon_0, delta_0), k)
    drawn = np.arange(k + 1)
    losses = (2 * drawn - k) * epsilon_0
    masses = stats.binom.pmf(drawn, k, 1 / (1 + math.exp(-epsilon_0)))

    def exact(epsilon):
        finite = masses @ np.maximum(0.0, -np.expm1(epsilon - losses))
        return 1 - (1 - delta_0) ** k * (1 - finite)

    for delta in (DELTA, 1e-3):
        price = Guarantee(PrivacyEvent(event)).epsilon(delta)
        assert exact(price) <= delta
        assert exact(price - 1e-3) > delta
    # The sum of ε, or the formula with √k, is far above.
    assert price < 0.8 * k * epsilon_0


def test_beside_a_run():
    """The number of the accountant of dp_accounting, with its own pair."""
    run = pld.from_gaussian_mechanism(1.0, sampling_prob=0.01, use_connect_dots=True)
    other = pld.from_privacy_parameters(common.DifferentialPrivacyParameters(0.5, 1e-6))
    right = run.self_compose(1000).compose(other).get_epsilon_for_delta(DELTA)
    options = {"dataset_size": 10_000, "batch_size": 100, "steps": 1000, "delta": DELTA}
    plan = dpoptax.PrivacyPlan(**options, noise_multiplier=1.0, also=[StatedDpEvent(0.5, 1e-6)])
    assert plan.epsilon == pytest.approx(right, abs=1e-4)
    assert plan.guarantee().other_events == 1
    calibrated = dpoptax.PrivacyPlan(**options, epsilon=3.0, also=[StatedDpEvent(0.5, 1e-6)])
    assert 2.99 < calibrated.epsilon <= 3.0


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 3, 40.0])
def test_renyi_divergences(epsilon):
    orders = np.array([1.01, 1.5, 2, 7.5, 64, 512, np.inf])
    found = divergences(StatedDpEvent(epsilon), orders)
    exact = []
    with mpmath.workdps(60):
        p = 1 / (1 + mpmath.exp(-mpmath.mpf(epsilon)))
        for a in map(mpmath.mpf, orders[:-1].tolist()):
            moment = p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)
            exact.append(float(mpmath.log(moment) / (a - 1)))
    assert np.all(found[:-1] >= exact)
    assert np.all(found <= np.minimum(epsilon, orders * epsilon**2 / 2) * (1 + 1e-12))
    assert found[-1] == epsilon
    assert np.all(np.isinf(divergences(StatedDpEvent(epsilon, 1e-9), [2, 3])))


def test_several_records_and_selection_pay_for_it():
    one = Guarantee(StatedDpEvent(0.5, 1e-7))
    # Group privacy of (ε, δ): 2ε, (1 + e^ε) δ.
    two = one.for_records(2)
    assert two.delta(1.0) == pytest.approx((1 + math.exp(0.5)) * 1e-7, rel=0.01)
    best = accounting.selection.best_of_random([one], mean=5, distribution="geometric")
    # With a geometric number, the best of several ε-DP trials is 3ε-DP (Liu and Talwar, 2019).
    assert one.epsilon(DELTA) < Guarantee(best).epsilon(DELTA) <= 1.5


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((-1.0, 0.0), "`epsilon` must be at least 0 and finite, got -1.0"),
        ((math.inf, 0.0), "`epsilon` must be at least 0 and finite"),
        (("1", 0.0), "`epsilon` must be a real number"),
        ((1.0, 1.0), "`delta` must be at least 0 and below 1, got 1.0"),
        ((1.0, -1e-9), "`delta` must be at least 0 and below 1"),
    ],
)
def test_refuses_other_numbers(numbers, message):
    with pytest.raises(ValueError, match=message):
        StatedDpEvent(*numbers)
