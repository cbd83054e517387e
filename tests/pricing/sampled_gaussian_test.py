"""Tests the grid of the losses of a sampled Gaussian."""

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution

from dpoptax import accounting
from tests.helpers import planned_epsilon


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
