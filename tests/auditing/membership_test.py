"""Tests of the report on a finished model, with scores of known distributions."""

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from dpoptax import accounting, auditing

RATES = (0.001, 0.01)


def _losses(mu, count=20_000, seed=0):
    """Returns scores with the errors of telling N(-mu, 1) from N(0, 1)."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=count) - mu, rng.normal(size=count)


@pytest.mark.parametrize(("claimed", "refuted"), [(2.0, False), (1.5, True)])
def test_refutes_claim_if_losses_reveal_more(claimed, refuted):
    guarantee = accounting.Guarantee(dpa.GaussianDpEvent(1 / claimed))
    report = auditing.membership_report(*_losses(2.0), guarantee=guarantee)
    assert report.refuted is refuted
    assert ("REFUTED" in str(report)) is refuted
    exact = 1 - auditing.gaussian_trade_off(claimed)(RATES)
    assert np.all(report.claimed_bounds >= exact)
    np.testing.assert_allclose(report.claimed_bounds, exact, rtol=0.03)


def test_rates_match_distributions():
    report = auditing.membership_report(*_losses(2.0))
    thresholds = report.losses_out[[20, 200]]
    expected = stats.norm.cdf(thresholds + 2.0)
    low, high = report.true_positive_bounds
    assert np.all((low < expected) & (expected < high))
    assert np.all((low < report.true_positive_rates) & (report.true_positive_rates < high))
    assert report.auc == pytest.approx(stats.norm.cdf(2.0 / np.sqrt(2)), abs=0.01)


@pytest.mark.parametrize("grid", [None, 0.25])
def test_limits_have_stated_coverage(grid):
    """The failure probability is close to the stated one, and ties only reduce it."""
    failures, runs = 0, 600
    for seed in range(runs):
        _, outside = _losses(0.0, 400, seed)
        if grid:
            outside = grid * np.round(outside / grid)
        report = auditing.membership_report(
            [0.0], outside, false_positive_rates=[0.01], confidence=0.6
        )
        threshold = outside[np.argsort(outside)[4]]
        true = stats.norm.cdf(threshold - grid / 2 if grid else threshold)
        failures += true > report.errors.false_positive_bounds[1, 0]
    most = stats.binom.ppf(0.999, runs, 0.1)
    assert failures <= most
    assert grid or failures >= stats.binom.ppf(0.001, runs, 0.1)


def test_curve_matches_scikit_learn():
    inside, outside = (np.round(losses, 1) for losses in _losses(1.0, 300))
    report = auditing.membership_report(inside, outside)
    labels = np.repeat([1, 0], 300)
    scores = -np.concatenate([inside, outside])
    false, true, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    np.testing.assert_allclose(report.roc(), [false, true])
    assert report.auc == pytest.approx(metrics.roc_auc_score(labels, scores))


@pytest.mark.parametrize(
    ("inside", "outside", "options", "message"),
    [
        ([], [1.0], {}, "`losses_in` must be numbers"),
        ([1.0], 1.0, {}, "`losses_out` must be numbers"),
        ([1.0], [np.nan], {}, "`losses_out` must be numbers"),
        ([1.0], [1.0], {"false_positive_rates": [0.0]}, "`false_positive_rates` must be"),
        ([1.0], [1.0], {"confidence": 1.0}, "`confidence` must be"),
    ],
)
def test_errors(inside, outside, options, message):
    with pytest.raises(ValueError, match=message):
        auditing.membership_report(inside, outside, **options)
