"""Tests of the price of the best trial against attacks, all orders of scores, and Rényi prices."""

import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as losses
from scipy import optimize, special, stats

from dpoptax import accounting
from dpoptax._pricing import best_trial as price
from dpoptax._pricing import curves
from dpoptax.accounting import selection
from tests.helpers import event_epsilon

DELTA = 1e-5
GAUSSIAN = dpa.GaussianDpEvent(1.39)
RUN = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(1.5)), 100)


def generating(distribution, mean):
    """Returns φ and φ′ by their textbook formulas."""
    if distribution == "poisson":
        return (lambda s: np.exp(mean * (s - 1))), (lambda s: mean * np.exp(mean * (s - 1)))
    if distribution == "geometric":
        g = 1 / mean
        return (lambda s: g * s / (1 - (1 - g) * s)), (lambda s: g / (1 - (1 - g) * s) ** 2)
    g = optimize.brentq(lambda g: (1 - g) / (-g * math.log(g)) - mean, 1e-12, 1 - 1e-9)
    log = math.log(g)
    return (
        lambda s: np.log1p(-(1 - g) * s) / log,
        lambda s: -(1 - g) / ((1 - (1 - g) * s) * log),
    )


def attack_epsilon(loss, masses, distribution, mean):
    """Returns the best ε at DELTA of attacks that choose the order of the scores.

    The outputs where the neighbor is most likely get the highest scores. The others are ordered by
    their likelihood ratio.

    Args:
      loss: ascending privacy losses of one trial.
      masses: their probabilities.
      distribution: of the number of trials.
      mean: its mean.
    """
    phi, _ = generating(distribution, mean)
    other = masses * np.exp(-loss)
    masses, other = masses / masses.sum(), other / other.sum()

    def deltas(epsilons, top):
        order = np.concatenate([np.arange(top, len(loss)), np.arange(top)])
        best, best_other = (
            np.diff(phi(np.concatenate([[0.0], np.minimum(np.cumsum(p[order]), 1.0)])))
            for p in (masses, other)
        )
        return [np.maximum(best - math.exp(e) * best_other, 0).sum() for e in epsilons]

    def epsilon(top):
        if deltas([0.0], top)[0] <= DELTA:
            return 0.0
        return optimize.brentq(
            lambda e: math.log(max(deltas([e], top)[0], 1e-300) / DELTA), 0.0, 60.0, xtol=1e-4
        )

    tops = np.searchsorted(np.cumsum(other), np.geomspace(0.01, 0.8, 24))
    return max(map(epsilon, tops))


def one_trial(event):
    """Returns the losses of a trial from dp_accounting."""
    if isinstance(event, dpa.GaussianDpEvent):
        pair = losses.from_gaussian_mechanism(event.noise_multiplier)
    else:
        step = event.event
        pair = losses.from_gaussian_mechanism(
            step.event.noise_multiplier, sampling_prob=step.sampling_probability
        ).self_compose(event.count)
    dense = pair._pmf_remove.to_dense_pmf()
    found = (dense._lower_loss + np.arange(dense.size)) * 1e-4
    return found, np.maximum(dense._probs, 0.0)


@pytest.mark.parametrize("distribution", selection.SHAPES)
@pytest.mark.parametrize("trial", [GAUSSIAN, RUN], ids=["gaussian", "sampled"])
def test_price_is_at_most_four_percent_above_an_attack(distribution, trial):
    """A price that were 4 % lower would be false."""
    event = selection.best_of_random([trial], mean=20, distribution=distribution)
    found = event_epsilon(event, DELTA)
    attacked = attack_epsilon(*one_trial(trial), distribution, 20)
    assert attacked <= found <= 1.04 * attacked


@pytest.mark.parametrize("distribution", selection.SHAPES)
def test_no_order_of_scores_exceeds_the_price(distribution):
    """All orders of five outputs, one of them rare, by the law of the best trial."""
    rng, mean = np.random.default_rng(0), 6.0
    phi, _ = generating(distribution, mean)
    grid = np.linspace(0.0, 6.0, 601)
    number = price.NumberOfTrials(mean, selection.SHAPES[distribution])
    closest = 0.0
    for _ in range(12):
        p, q = rng.dirichlet(np.full(4, 0.7), 2) * 0.98 + 0.005
        p, q = np.append(p * (1 - 1e-4), 1e-4), np.append(q * (1 - 1e-6), 1e-6)
        both = np.stack([p - np.exp(grid)[:, None] * q, q - np.exp(grid)[:, None] * p])
        profile = np.maximum(both, 0).sum(-1)
        at, bounds = price.selected_curve((grid, profile), number)
        for order in map(list, itertools.permutations(range(5))):
            best, other = (
                np.diff(phi(np.minimum(np.cumsum([0.0, *law[order]]), 1.0))) for law in (p, q)
            )
            exact = np.maximum(best - np.exp(at)[:, None] * other, 0).sum(-1)
            assert np.all(exact <= bounds + 1e-12)
            near = (bounds > 1e-6) & (bounds < 1e-3)
            closest = max(closest, np.max(exact[near] / bounds[near], initial=0.0))
    assert closest > 0.95


@pytest.mark.parametrize("distribution", selection.SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0, 100.0])
def test_price_is_below_that_by_renyi_divergences(distribution, mean):
    event = selection.best_of_random([RUN], mean=mean, distribution=distribution)
    single = event_epsilon(RUN, DELTA)
    assert single < event_epsilon(event, DELTA) < event_epsilon(event, DELTA, accountant="rdp")


def test_one_trial_costs_no_more_than_itself():
    event = selection.best_of_random([RUN], mean=1.0, distribution="geometric")
    assert event_epsilon(event, DELTA) == pytest.approx(event_epsilon(RUN, DELTA), rel=2e-3)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_candidates_with_crossing_curves_cost_more_than_either(accountant):
    """The price uses the largest divergence at each order, not the larger of two epsilons."""
    few = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(0.7)), 60)
    many = dpa.GaussianDpEvent(3.0)
    options = {"mean": 20, "distribution": "geometric"}
    prices = [
        event_epsilon(selection.best_of_random(trials, **options), DELTA, accountant=accountant)
        for trials in ([few, many], [few], [many], [few, few])
    ]
    assert prices[0] > max(prices[1:3])
    assert prices[3] == prices[1]


def test_best_trial_has_a_whole_curve_and_composes():
    event = selection.best_of_random([RUN], mean=20, distribution="geometric")
    found = accounting.Guarantee(event)
    epsilon = found.epsilon(DELTA)
    assert found.delta(epsilon) == pytest.approx(DELTA, rel=1e-3)
    assert 0 < found.trade_off(0.01) < 0.99
    both = accounting.Guarantee(dpa.ComposedDpEvent([event.dp_event, RUN]))
    assert epsilon < both.epsilon(DELTA) < epsilon + event_epsilon(RUN, DELTA) + 0.01


def test_a_trial_without_privacy_has_no_price():
    event = selection.best_of_random([dpa.NonPrivateDpEvent()], mean=2, distribution="geometric")
    assert event_epsilon(event, DELTA) == math.inf


@pytest.mark.parametrize(
    ("distribution", "delta", "mu", "attack"),
    [
        ("geometric", 0.70, 2.65, 1.50),
        ("logarithmic", 0.51, 2.1, 1.31),
        ("poisson", 0.88, 3.6, 1.90),
    ],
)
def test_small_epsilons_cost_at_most_all_trials(distribution, delta, mu, attack):
    """Also less than (ε, δ) at large ε implies; the attacks are the best that are known."""
    sigma = 1 / 0.7567
    trial = accounting.PrivacyEvent(dpa.GaussianDpEvent(sigma))
    event = selection.best_of_random([trial], mean=20, distribution=distribution)
    found = accounting.Guarantee(event)
    # All trials: K is independent of the data, so δ is a mean.
    law = {
        "geometric": stats.geom(1 / 20),
        "logarithmic": stats.logser(1 - price.NumberOfTrials(20.0, 0.0).gamma),
        "poisson": stats.poisson(20),
    }[distribution]
    number = np.arange(1, 2000)

    def all_trials(epsilon):
        mus = np.sqrt(number) / sigma
        gaussian = stats.norm.cdf(mus / 2 - epsilon / mus) - math.exp(epsilon) * stats.norm.cdf(
            -mus / 2 - epsilon / mus
        )
        return float(law.pmf(number) @ gaussian)

    for epsilon in (0.0, 1.0):
        assert all_trials(epsilon) <= found.delta(epsilon) <= 1.05 * all_trials(epsilon)
    assert found.delta(1.0) <= delta
    assert attack < found.gdp_mu(DELTA) <= mu
    one = accounting.Guarantee(trial)
    assert one.delta(1.0) < found.delta(1.0)


@pytest.mark.parametrize("mean", [1.0, 3.0, 40.0])
@pytest.mark.parametrize("shape", selection.SHAPES.values())
def test_slope_is_that_of_the_law(mean, shape):
    number = price.NumberOfTrials(mean, shape)
    chances = number.law.pmf(np.arange(20_000))
    assert chances.sum() == pytest.approx(1)
    assert np.arange(20_000) @ chances == pytest.approx(mean)
    w = np.array([0.5, 0.1])
    slopes = [(np.arange(1, 20_000) * (1 - x) ** np.arange(19_999)) @ chances[1:] for x in w]
    assert number.slope(w) == pytest.approx(np.array(slopes), rel=1e-6)


def test_other_shapes_have_no_price():
    event = dpa.dp_event.RepeatAndSelectDpEvent(RUN, mean=3.0, shape=0.5)
    with pytest.raises(ValueError, match="does not support the event RepeatAndSelect"):
        event_epsilon(event, DELTA)
    assert event_epsilon(event, DELTA, accountant="rdp") > event_epsilon(RUN, DELTA)


def test_a_curve_is_convex():
    """Bounds at other ε imply those of randomized response between them."""
    epsilons = np.array([0.0, 1.0, 2.0, 3.0])
    found = curves.convex(epsilons, np.array([1.0, 1.0, 1e-5, 1e-5]))
    assert found[2:] == pytest.approx(1e-5, rel=1e-9)
    for epsilon, bound in zip(epsilons[:2], found[:2], strict=True):
        exact = 1e-5 + (1 - 1e-5) * (math.exp(2) - math.exp(epsilon)) / (1 + math.exp(2))
        assert bound == pytest.approx(exact, rel=1e-12)
    gaussian = special.ndtr(0.5 - epsilons) - np.exp(epsilons) * special.ndtr(-0.5 - epsilons)
    np.testing.assert_allclose(curves.convex(epsilons, gaussian), gaussian, rtol=1e-12)
