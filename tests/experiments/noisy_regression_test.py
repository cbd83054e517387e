"""Tests of DiSK's synthetic study: the order that the paper claims, before and after tuning."""

import numpy as np
import pytest

from experiments.studies.noisy_regression import RATES, noisy_regression


@pytest.fixture(scope="module")
def result():
    """Returns the mean over seeds, (methods, levels, rates)."""
    return noisy_regression().mean(axis=-1)


@pytest.mark.parametrize("rate", [0.1, 0.5, 1.0])
def test_kalman_is_best_at_one_large_rate(result, rate):
    plain, filtered, kalman = result[..., RATES.index(rate)]
    assert np.all(kalman < 0.95 * filtered)
    assert np.all(filtered < plain)


def test_kalman_is_several_times_better_near_stability_limit(result):
    plain, _, kalman = result[..., RATES.index(1.0)]
    assert np.all(kalman < plain / 4)


def test_methods_nearly_coincide_at_tuned_rates(result):
    best = result.min(axis=-1)
    assert np.all(best.max(axis=0) < 1.2 * best.min(axis=0))
