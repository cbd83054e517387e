"""Tests of the finite filter that estimates its coefficients from noisy gradients."""

import numpy as np
import pytest

import dpoptax
from tests.helpers import filtered

STEPS, DIM = 300, 3000


def _coefficients(signal, stddev, length=5):
    """Returns the coefficients of every step on a noisy signal (steps, d), and the outputs."""
    tx = dpoptax.contrib.adaptive_fir(length, stddev)
    out, b = filtered(tx, signal, stddev, lambda state: state.b)
    return b, out


def _autoregressive(rho):
    """Returns unit-power coordinates with correlation rho^τ."""
    rng = np.random.default_rng(1)
    signal = [rng.normal(size=DIM)]
    for _ in range(STEPS - 1):
        signal.append(rho * signal[-1] + np.sqrt(1 - rho**2) * rng.normal(size=DIM))
    return np.stack(signal)


@pytest.mark.parametrize("rho", [0.95, 0.8, 0.0])
def test_finds_coefficients_of_known_correlation(rho):
    b, _ = _coefficients(_autoregressive(rho), stddev=1.0)
    correlation = np.maximum(rho ** np.arange(5) - 0.5, 0.0)
    want = correlation / correlation.sum()
    np.testing.assert_allclose(b[100:].mean(0), want, atol=0.03)
    np.testing.assert_allclose(b.sum(1), 1.0, rtol=1e-5)


def test_averages_constant_gradient_under_strong_noise():
    still = np.broadcast_to(np.random.default_rng(2).normal(size=DIM), (STEPS, DIM))
    b, out = _coefficients(still, stddev=3.0)
    np.testing.assert_allclose(b[0], [1, 0, 0, 0, 0])
    np.testing.assert_allclose(b[100:].mean(0), 0.2, atol=0.05)
    error = np.mean((out[100:] - still[100:]) ** 2)
    assert error == pytest.approx(9.0 / 5, rel=0.15)


def test_output_applies_estimated_coefficients():
    signal = _autoregressive(0.9)
    b, out = _coefficients(signal, stddev=1e-6)
    t = 50
    want = sum(b[t, tau] * signal[t - tau] for tau in range(5))
    np.testing.assert_allclose(out[t], want, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 1, "stddev": 1.0}, "`length` must .* got 1"),
        ({"length": 4, "stddev": 0.0}, "`stddev` must .* got 0.0"),
        ({"length": 4, "stddev": 1.0, "decay": 1.0}, "`decay` must .* got 1.0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        dpoptax.contrib.adaptive_fir(**arguments)
