"""Tests of Poisson sampling with a probability for each group."""

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

import dpoptax
from dpoptax import accounting
from dpoptax.sampling import GroupedPoissonSampler, PoissonSampler
from tests.helpers import planned_epsilon

ACCEPT, REJECT = 1e-3, 1e-6
GROUPS = {"group_sizes": (30, 10), "weights": (1.0, 3.0)}


def membership(sampler, steps):
    rows = np.zeros((steps, sampler.dataset_size))
    for row, sample in zip(rows, sampler.samples(0, steps), strict=True):
        np.add.at(row, sample.indices[sample.mask], 1)
    return rows


@pytest.mark.parametrize("seed", [1, bytes(range(32))])
def test_records_are_independent_with_group_probabilities(seed):
    sampler = GroupedPoissonSampler(40, 12, seed=seed, **GROUPS)
    each = np.repeat(sampler.probabilities, (30, 10))
    assert each.sum() == pytest.approx(12)
    steps = 1500
    drawn = membership(sampler, steps)
    assert drawn.max() == 1
    z = (drawn.sum(0) - steps * each) / np.sqrt(steps * each * (1 - each))
    assert stats.chi2.sf(np.sum(z**2), 40) > ACCEPT
    even = (drawn.sum(0) - steps * 0.3) / np.sqrt(steps * 0.3 * 0.7)
    assert stats.chi2.sf(np.sum(even**2), 40) < REJECT
    # Independent within and between groups: correlations of records have variance 1/steps.
    correlations = np.corrcoef(drawn.T)[np.triu_indices(40, 1)]
    assert stats.chi2.sf(steps * np.sum(correlations**2), len(correlations)) > ACCEPT


def test_price_uses_largest_probability():
    sampler = GroupedPoissonSampler(1000, 48, seed=0, group_sizes=(900, 100), weights=(1, 3))
    run = {"noise_multiplier": 1.0, "steps": 50, "delta": 1e-5, "accountant": "rdp"}
    spent = planned_epsilon(sampler=sampler, **run)
    largest = dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(0.12, dpa.GaussianDpEvent(1.0)), 50)
    alone = accounting.Guarantee(largest, accountant="rdp").epsilon(1e-5)
    assert spent == pytest.approx(alone, rel=1e-3)
    uniform = PoissonSampler(1000, 48, seed=0)
    assert spent > 2 * planned_epsilon(sampler=uniform, **run)


@pytest.mark.parametrize("weight", [1, 30])
def test_draws_rarely_exceed_padding(weight):
    sampler = GroupedPoissonSampler(4000, 100, seed=0, group_sizes=(3900, 100), weights=(1, weight))
    low, high = sampler.probabilities
    small, large = stats.binom(3900, low), stats.binom(100, high)
    counts = np.arange(101)
    exceeds = np.sum(large.pmf(counts) * small.sf(sampler.padded_size - 1 - counts))
    assert exceeds <= sampler.full_probability * (1 + 1e-9) <= 1e-17
    assert 100 < sampler.padded_size < 250
    event = sampler.dp_event(1.0, 10)
    assert event.overflow == pytest.approx(10 * sampler.full_probability)


def test_equal_weights_are_poisson_sampling():
    sampler = GroupedPoissonSampler(1000, 48, seed=0, group_sizes=(900, 100), weights=(2, 2))
    assert sampler.probabilities == pytest.approx((0.048, 0.048))
    whole = GroupedPoissonSampler(5, 5, seed=0, group_sizes=(4, 1), weights=(1, 1))
    assert whole.padded_size == 5
    third = GroupedPoissonSampler(30, 30, seed=0, group_sizes=(10,) * 3, weights=(0.7, 0.7, 0.7))
    assert third.probabilities == (1.0, 1.0, 1.0)
    assert whole.sample(0).mask.all()
    assert whole.dp_event(1.0, 3) == PoissonSampler(5, 5, seed=0).dp_event(1.0, 3)


def test_plan_accepts_grouped_sampler():
    plan = dpoptax.PrivacyPlan(
        sampler=GroupedPoissonSampler(1000, 48, group_sizes=(900, 100), weights=(1, 3)),
        steps=10,
        noise_multiplier=2.0,
    )
    assert plan.guarantee().sampling["probabilities"] == pytest.approx([0.04, 0.12])
    assert len(list(plan.new_run().draws())) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_sizes": (30, 9)}, "`group_sizes` must add up to `dataset_size`"),
        ({"weights": (1.0,)}, "`group_sizes` must add up to `dataset_size` and have a weight"),
        ({"group_sizes": (40, 0)}, "`group_sizes` must be an integer of at least 1"),
        ({"weights": (1.0, 0.0)}, "`weights` must be positive"),
        ({"weights": (1.0, 30.0)}, "`weights` must give probabilities of at most 1"),
    ],
)
def test_errors(change, message):
    with pytest.raises(ValueError, match=message):
        GroupedPoissonSampler(40, 12, seed=0, **GROUPS | change)
