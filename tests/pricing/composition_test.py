"""Tests of composition of privacy losses against closed-form sums, for any δ and step count."""

import math
from types import SimpleNamespace

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import special, stats

from dpoptax._pricing import composition
from tests.helpers import event_epsilon, planned_epsilon, profile


def _coin(interval, towards):
    """Returns losses of +h with probability `towards`, else -h."""
    masses = {1: towards, -1: 1 - towards}
    return PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, interval)


def _log_delta(interval, towards, steps, epsilon):
    """Returns log E[(1 - exp(eps - S))+] for a number of coins, a binomial sum in logarithms."""
    heads = np.arange(steps + 1)
    sums = interval * (2 * heads - steps)
    log_mass = special.gammaln(steps + 1) - special.gammaln(heads + 1)
    log_mass += -special.gammaln(steps - heads + 1)
    log_mass += heads * math.log(towards) + (steps - heads) * math.log1p(-towards)
    above = sums > epsilon
    return special.logsumexp(log_mass[above] + np.log(-np.expm1(epsilon - sums[above])))


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12, 1e-40, 1e-150])
@pytest.mark.parametrize(
    ("steps", "interval", "towards"), [(1, 0.5, 0.6), (30, 0.1, 0.6), (10**5, 3e-3, 0.5008)]
)
def test_coin_epsilon_is_tight(steps, interval, towards, delta):
    found = composition.composed_epsilon([(_coin(interval, towards), steps)], interval, delta)
    if found == 0:
        assert _log_delta(interval, towards, steps, 0.0) <= math.log(delta)
        return
    # Logarithms of factorials up to 10^5 are accurate to about 1e-10.
    over = _log_delta(interval, towards, steps, found) - math.log(delta)
    assert -1e-4 < over < 1e-9 or found == pytest.approx(steps * interval, rel=1e-4)


def test_composes_several_kinds_of_steps():
    interval, kinds = 0.1, [(0.6, 12), (0.53, 9)]
    pairs = [(_coin(interval, towards), count) for towards, count in kinds]
    found = composition.composed_epsilon(pairs, interval, 1e-4)
    masses = np.ones(1)
    for towards, count in kinds:
        for _ in range(count):
            masses = np.convolve(masses, [1 - towards, 0.0, towards])
    sums = interval * (np.arange(len(masses)) - 21)
    exact = masses @ np.maximum(-np.expm1(found - sums), 0.0)
    assert exact <= 1e-4 * (1 + 1e-12)
    assert exact == pytest.approx(1e-4, rel=1e-6)


def test_rare_large_loss_costs_next_to_nothing():
    # As from a truncated Poisson draw.
    interval, usual = 1e-2, {1: 0.505, -1: 0.495}

    def epsilon(masses):
        pair = PrivacyLossDistribution.create_from_rounded_probability(masses, 0.0, interval)
        return composition.composed_epsilon([(pair, 4000)], interval, 1e-5)

    assert epsilon({**usual, 500: 1e-22}) == pytest.approx(epsilon(usual), rel=1e-6)


def test_infinite_loss_is_charged_to_delta():
    pair = PrivacyLossDistribution.create_from_rounded_probability({0: 1 - 1e-6}, 1e-6, 0.1)
    assert composition.composed_epsilon([(pair, 9)], 0.1, 0.99 * (1 - (1 - 1e-6) ** 9)) == math.inf
    assert composition.composed_epsilon([(pair, 9)], 0.1, 1.01 * (1 - (1 - 1e-6) ** 9)) == 0.0


@pytest.mark.parametrize("delta", [1e-12, 1e-13])
def test_small_deltas_survive_rounding_of_transforms(delta):
    # The true value is at most the Rényi bound of Poisson sampling. It is at least the ε of a run
    # in which an example takes part in all steps, which has probability 0.9999^1000.
    steps, q, sigma = 1000, 0.9999, 40.0
    least = event_epsilon(dpa.GaussianDpEvent(sigma / steps**0.5), delta / q**steps)
    run = {"noise_multiplier": sigma, "sampling_probability": q, "steps": steps, "delta": delta}
    found = planned_epsilon(**run)
    assert least + steps * math.log(q) < found < planned_epsilon(**run, accountant="rdp")


def test_finds_least_epsilon_where_delta_is_nearly_flat():
    # Up to ε = 0.9, δ is one rounding step above the target, and the two logarithms are equal.
    calls = []

    def delta(epsilon):
        calls.append(epsilon)
        assert len(calls) < 1000
        return math.nextafter(0.02, 1.0) if epsilon < 0.9 else 0.01

    epsilon = composition._least(SimpleNamespace(delta=delta), 0.02, 1.0)
    assert 0.9 <= epsilon <= 1.0


def test_pairs_of_profile_are_proven():
    """No δ of the profile is below that of the Gaussian mechanism, and the last is the least."""
    epsilons, deltas = profile(
        dpa.GaussianDpEvent(1.0),
        dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
        1e-3,
        least_delta=1e-6,
        points=20,
    )
    exact = stats.norm.cdf(0.5 - epsilons) - np.exp(epsilons) * stats.norm.cdf(-0.5 - epsilons)
    assert (exact <= deltas * (1 + 1e-6)).all()
    assert (deltas[:-1] <= exact[:-1] * 1.05).all()
    assert deltas[-1] <= 1e-6 < deltas[-2]
