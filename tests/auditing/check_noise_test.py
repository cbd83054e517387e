"""Tests that correct noise raises no alarm, and that reused, wrong and small noise is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpoptax
from dpoptax import auditing

SIZE = 4000


def _release(key, params):
    """Returns the release of an empty batch, with noise of standard deviation 0.5."""
    tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=4, key=key)
    grad_fn = dpoptax.clipped_grad(lambda p, x: x * sum(map(jnp.sum, jax.tree.leaves(p))), 1.0)
    state, releases = tx.init(params), []
    for _ in range(2):
        update, state = tx.update(grad_fn(params, jnp.zeros(4)), state)
        releases.append(update)
    return releases


def test_noise_of_steps_and_runs_raises_no_alarm():
    params = {"w": jnp.zeros((50, 40)), "b": jnp.zeros(2000)}
    first, second = _release(jax.random.key(0), params)
    other, _ = _release(jax.random.key(1), params)
    for each in (second, other):
        report = auditing.check_noise(first, each, stddev=0.5)
        assert not report.alarm
        assert report.coordinates == 4000
        assert np.all(report.intervals[:, 0] < 0.5)
        assert np.all(report.intervals[:, 1] > 0.5)
    again, _ = _release(jax.random.key(0), params)
    assert auditing.check_noise(first, again, stddev=0.5).alarm


def test_false_alarms_are_rare():
    """With a rate of 1 in 1,000, more than four alarms in 500 checks have a probability of 2e-4."""
    samples = np.random.default_rng(0).normal(size=(500, 2, 300))
    reports = [auditing.check_noise(*each, stddev=1.0) for each in samples]
    assert sum(report.alarm for report in reports) <= 4
    p_values = np.array([[test.p_value for test in report.tests] for report in reports])
    for column in (0, 2, 3, 4, 5):
        assert stats.kstest(p_values[:, column], "uniform").pvalue > 1e-3


def _correlated(rng, first):
    return 0.8 * rng.normal(size=SIZE) - 0.6 * first


FAULTS = {
    "reused": lambda rng, first: first,
    "reused and rescaled": lambda rng, first: -0.5 * first,
    "partly reused": _correlated,
    "constant": lambda rng, first: np.full(SIZE, 1.0),
    "none": lambda rng, first: np.zeros(SIZE),
    "two thirds": lambda rng, first: 2 / 3 * rng.normal(size=SIZE),
    "three halves": lambda rng, first: 1.5 * rng.normal(size=SIZE),
    "uniform": lambda rng, first: rng.uniform(-(3**0.5), 3**0.5, size=SIZE),
    "biased": lambda rng, first: rng.normal(size=SIZE) + 0.2,
}


@pytest.mark.parametrize("name", FAULTS)
def test_finds_fault_of_noise(name):
    rng = np.random.default_rng(0)
    first = rng.normal(size=SIZE)
    report = auditing.check_noise(first, FAULTS[name](rng, first), stddev=1.0)
    assert report.findings[0].p_value < 1e-6
    assert "NOT as claimed" in str(report)


@pytest.mark.parametrize("scale", [2 / 3, 1.5])
def test_each_test_of_size_rejects_wrong_scale(scale):
    samples = scale * np.random.default_rng(0).normal(size=(2, SIZE))
    report = auditing.check_noise(*samples, stddev=1.0)
    assert all(test.p_value < 1e-6 for test in report.tests[2:])


def test_finds_noise_that_leaves_share():
    rng = np.random.default_rng(0)
    shared, *others = rng.normal(size=(4, 1000))
    first, second = [shared, others[0], shared], others
    report = auditing.check_noise(first, second, stddev=1.0)
    assert [finding.name for finding in report.findings] == ["correlation of leaves"]


def test_subtracts_signal():
    first, second = np.random.default_rng(0).normal(size=(2, SIZE))
    signal = {"w": np.arange(SIZE)}
    releases = [{"w": each + signal["w"]} for each in (first, second)]
    assert not auditing.check_noise(*releases, stddev=1.0, signal=signal).alarm
    assert auditing.check_noise(*releases, stddev=1.0).alarm


@pytest.mark.parametrize(
    ("first", "second", "stddev", "match"),
    [
        (np.zeros(3), np.zeros(4), 1.0, "same shapes"),
        (np.zeros(1), np.zeros(1), 1.0, "two coordinates"),
        (np.zeros(3), np.full(3, np.nan), 1.0, "finite"),
        (np.zeros(3), np.zeros(3), 0.0, "positive"),
    ],
)
def test_rejects_wrong_arguments(first, second, stddev, match):
    with pytest.raises(ValueError, match=match):
        auditing.check_noise(first, second, stddev=stddev)
