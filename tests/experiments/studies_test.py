"""Tests of the papers' synthetic studies: their claims and our results."""

import jax
import numpy as np
import optax
import pytest

import dpoptax
from experiments.studies import filters, geodp_errors
from experiments.studies.noisy_regression import RATES, noisy_regression
from experiments.studies.rows import pick

KEY = jax.random.key(0)


def test_filter_responses_match_figure_6():
    rows = filters.rows()
    decibel = {n: pick(rows, "value", filter=n, response="frequency") for n in filters.TABLE_2}
    assert decibel["momentum"][-1] == pytest.approx(-25.6, abs=0.1)
    assert decibel["doppler-second-order"][-1] == -100
    assert all(abs(curve[0]) < 0.1 for curve in decibel.values())
    time = pick(rows, "value", filter="doppler-f4", response="time")
    assert time.max() == pytest.approx(0.32, abs=0.005)


def expected_errors(gradient, sigma, batch_size, beta, clip_norm=0.1):
    """Returns the expectation of `geodp_errors` to first order in the angular noise.

    With s = σC/B, a = √(d + 2)βπσ/B and tail norms T_z = √(Σ_{i≥z} ḡ_i²):

        GeoDP: (d - 1) a² and s² + a² Σ_{z<d} T_z²;   DP-SGD: s² Σ_{z<d} 1/T_z² and d s²,

    because the z-th angle turns the tail of length T_z. The first and the last are exact.
    """
    g = np.asarray(gradient, np.float64)
    d, tails = g.size, np.cumsum(g[::-1] ** 2)[::-1][:-1]  # T_z², z < d
    s, a = sigma * clip_norm / batch_size, np.sqrt(g.size + 2) * beta * np.pi * sigma / batch_size
    return (d - 1) * a**2, s**2 * np.sum(1 / tails), s**2 + a**2 * np.sum(tails), d * s**2


@pytest.mark.parametrize("norm", [1e-3, 1e-2])
def test_small_noise_errors_match_closed_form(norm):
    gradient = geodp_errors.random_mean_gradient(800, norm=norm, key=jax.random.key(1))
    settings = {"noise_multiplier": 0.01, "batch_size": 1024, "beta": 0.5}
    actual = geodp_errors.geodp_errors(gradient, **settings, repeats=200, key=KEY)
    expected = expected_errors(gradient, *settings.values())
    # The last tails are short, so their angles are uncertain: 1/T² is heavy-tailed.
    np.testing.assert_allclose(actual, expected, rtol=0.15)
    np.testing.assert_allclose(actual.geodp_direction, expected[0], rtol=0.02)
    np.testing.assert_allclose(actual.dp_gradient, expected[3], rtol=0.02)


@pytest.mark.slow
def test_figure_3d_error_of_geodp_grows_with_dimension_squared():
    rows = geodp_errors.figure_3(KEY)
    columns = (pick(rows, name, panel="d") for name in geodp_errors.GeoDPErrors._fields)
    errors = geodp_errors.GeoDPErrors(*columns)
    growth = errors.geodp_direction[-1] / errors.geodp_direction[0]
    assert growth == pytest.approx((20000 / 500) ** 2, rel=0.1)
    assert errors.dp_direction[-1] / errors.dp_direction[0] < 3
    # In the paper GeoDP loses above d = 2000; here it loses above 500.
    assert np.all(errors.geodp_direction[1:] > errors.dp_direction[1:])


def test_noisy_regression_takes_noises_and_methods():
    """Notebooks compare other methods. Several times the loss of DiSK is the paper's claim."""
    methods = {"plain": optax.identity(), "DiSK": dpoptax.disk(0.3, 1.0)}
    plain, kalman = noisy_regression((1.0,), methods=methods, seeds=8).mean(-1)[:, 0]
    assert plain.shape == (len(RATES),)
    assert kalman[-1] < plain[-1] / 4
    assert plain.min() < 1.2 * kalman.min()
