"""Tests the losses of a sampled Gaussian against dp_accounting and numerical integrals."""

import math

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
from scipy import integrate, stats

from dpoptax import accounting
from dpoptax._pricing import sampled_gaussian
from tests.helpers import planned_epsilon

CASES = [(0.5, 0.01), (0.84, 1e-3), (1.1, 0.1), (3.0, 0.5), (20.0, 0.09), (0.5, 1e-7), (2.0, 0.999)]
KINDS = [AdjacencyType.REMOVE, AdjacencyType.ADD]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("sigma", "q"), CASES)
def test_deltas_are_those_of_dp_accounting_and_of_an_integral(sigma, q, kind):
    mechanism = GaussianPrivacyLoss(sigma, sampling_prob=q, adjacency_type=kind)
    edge = math.log1p(-q)
    near = edge * np.array([1 - 1e-9, 1 + 1e-9, 1 - 1e-3, 1 + 1e-3])
    epsilons = np.sort(
        [0.0, 1e-12, -1e-12, 0.01, -0.01, 0.5, -0.5, 4.0, -4.0, 900.0, *near, *-near]
    )
    found = sampled_gaussian._deltas(mechanism, sigma, epsilons)
    np.testing.assert_allclose(found, mechanism.get_delta_for_epsilon(epsilons), 0, 4e-16)

    def excess(y, epsilon):
        plain, moved = stats.norm.pdf([y, y - 1], scale=sigma)
        p, r = (1 - q) * plain + q * moved, plain
        if kind is AdjacencyType.ADD:
            p, r = r, p
        return max(p - math.exp(epsilon) * r, 0.0)

    for epsilon, delta in zip(epsilons[::4], found[::4], strict=True):
        grid = np.linspace(-12 * sigma, 12 * sigma + 1, 60)
        whole = integrate.quad(
            excess, grid[0], grid[-1], (epsilon,), points=grid[1:-1], limit=500, epsabs=1e-11
        )
        assert delta == pytest.approx(whole[0], abs=2e-9)


@pytest.mark.parametrize(("sigma", "q"), [*CASES, (1.5, 1.0)])
def test_pair_is_that_of_dp_accounting(sigma, q):
    interval = 1e-3 * max(1.0, 1 / sigma)
    found = sampled_gaussian.pair_of(sigma, q, interval)
    expected = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval
    )
    assert found._symmetric == expected._symmetric
    for own, theirs in (
        (found._pmf_remove, expected._pmf_remove),
        (found._pmf_add, expected._pmf_add),
    ):
        own, theirs = own.to_dense_pmf(), theirs.to_dense_pmf()
        assert own._lower_loss == theirs._lower_loss
        assert own._infinity_mass == pytest.approx(theirs._infinity_mass, rel=1e-9)
        np.testing.assert_allclose(own._probs, theirs._probs, 0, 1e-11)


def test_sample_of_nearly_all_records_costs_no_more_than_all():
    """dp_accounting raises for some of these probabilities."""
    whole = sampled_gaussian.pair_of(0.5, 1.0, 1e-2).get_delta_for_epsilon([0.0, 1.0, 4.0])
    for q in (1 - 1e-9, math.nextafter(1, 0)):
        found = sampled_gaussian.pair_of(0.5, q, 1e-2).get_delta_for_epsilon([0.0, 1.0, 4.0])
        np.testing.assert_allclose(found, whole, 1e-6)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "right"),
    [(1e-4, 3.0, 10**6, 0.127), (1e-5, 1.0, 10**6, 0.0453), (1e-4, 2.0, 10**5, 0.0593)],
)
def test_small_losses_get_a_finer_grid(q, sigma, steps, right):
    """A grid of 1e-4 doubled ε where the losses of a step are smaller."""
    delta = 1e-6
    found = planned_epsilon(
        noise_multiplier=sigma, sampling_probability=q, steps=steps, delta=delta
    )
    assert found == pytest.approx(right, rel=0.005)
    # Losses rounded down, by dp_accounting, on a grid that is finer still: a lower bound.
    lower = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        sampling_prob=q,
        pessimistic_estimate=False,
        value_discretization_interval=2e-6,
        use_connect_dots=False,
    )
    assert lower.self_compose(steps).get_epsilon_for_delta(delta) <= found
    # The central limit theorem.
    mu = q * math.sqrt(steps * math.expm1(sigma**-2))
    assert found == pytest.approx(
        planned_epsilon(noise_multiplier=1 / mu, sampling_probability=1.0, steps=1, delta=delta),
        rel=0.08,
    )
    # A plot, and μ, use a coarser grid.
    planned = accounting.planned_guarantee(
        noise_multiplier=sigma, sampling_probability=q, steps=steps
    )
    assert planned.epsilon_curve([steps // 2, steps], delta)[0] < found
    assert 0.99 * mu < planned.gdp_mu(delta) < 1.4 * mu
