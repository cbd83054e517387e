"""Tests of minimum separation: draws by exact counts, and prices without Monte Carlo."""

import collections
import dataclasses
import itertools
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from dpoptax import accounting, matrix
from dpoptax._pricing import monte_carlo
from dpoptax.sampling import MinSeparationSampler, _base
from tests.helpers import event_epsilon, planned_epsilon
from tests.pricing.monte_carlo_test import paths

DELTA = 1e-5


def drawn(sampler, start, steps):
    """Returns a (steps, N) 0/1 matrix of the records in each step."""
    found = np.zeros((steps, sampler.dataset_size), int)
    for t in range(steps):
        indices, mask = sampler.sample(start + t)
        np.add.at(found[t], indices[mask], 1)
    assert found.max() <= 1
    return found


def fits(counts, law):
    """Returns the p-value of counts of keys, with rare keys merged."""
    total = sum(counts.values())
    assert set(counts) <= set(law)
    often = [key for key in law if law[key] * total >= 5]
    observed = np.array([counts[key] for key in often])
    expected = np.array([law[key] * total for key in often])
    if total - expected.sum() > 1e-6 * total:
        observed = np.append(observed, total - observed.sum())
        expected = np.append(expected, total - expected.sum())
    return stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue


class TestDraws:
    @pytest.mark.parametrize(
        ("size", "batch", "separation", "start", "steps"),
        [
            (12, 4, 3, 5, 3),
            pytest.param(10, 4, 1, 0, 3, marks=pytest.mark.slow),
            pytest.param(9, 2, 2, 13, 4, marks=pytest.mark.slow),
        ],
    )
    def test_draws_follow_the_chain_and_are_independent(
        self, size, batch, separation, start, steps
    ):
        single, pairs = collections.Counter(), collections.Counter()
        for seed in range(100):
            sampler = MinSeparationSampler(size, batch, seed=seed, separation=separation)
            names = [tuple(column) for column in drawn(sampler, start, steps).T.tolist()]
            single.update(names)
            pairs.update(zip(names[::2], names[1::2], strict=False))
        law = paths(sampler.chain, steps)
        assert sum(law.values()) == pytest.approx(1)
        assert fits(single, law) > 1e-3
        both = {(a, b): law[a] * law[b] for a, b in itertools.product(law, law)}
        assert fits(pairs, both) > 1e-3
        # The law of another separation does not fit.
        other = MinSeparationSampler(size, batch, seed=0, separation=1 if separation > 1 else 2)
        wrong = {x: 0.0 for x in law} | paths(other.chain, steps)
        assert separation == 1 or fits(single, wrong) < 1e-6

    def test_no_record_participates_twice_within_separation(self):
        sampler = MinSeparationSampler(5000, 300, seed=2, separation=5)
        found = drawn(sampler, 37, 40)
        recent = np.array([found[t : t + 5].sum(axis=0).max() for t in range(36)])
        assert recent.max() == 1
        # A step's batch is binomial with mean B, from the first step on.
        sizes = found.sum(axis=1)
        assert abs(sizes.mean() - 300) < 4 * math.sqrt(300)

    def test_full_separation_draws_every_record_in_each_cycle(self):
        sampler = MinSeparationSampler(12, 3, seed=4, separation=4)
        assert sampler.participation_probability == 1
        found = drawn(sampler, 0, 12)
        np.testing.assert_array_equal(found[:4].sum(axis=0), 1)
        np.testing.assert_array_equal(found[:4], found[4:8])
        np.testing.assert_array_equal(found[:4], found[8:])

    def test_steps_may_be_drawn_in_any_order(self):
        sampler = MinSeparationSampler(50, 5, seed=1, separation=3)
        steps = [45, 0, 23, 24, 20, 45]
        found = [sampler.sample(t) for t in steps]
        for t, sample in zip(steps, found, strict=True):
            _base._kept_results.cache_clear()
            np.testing.assert_array_equal(sampler.sample(t), sample)

    @pytest.mark.slow
    def test_overflowing_draws_keep_a_uniform_subset(self):
        dropped = np.zeros(24, int)
        for seed in range(150):
            cut = MinSeparationSampler(24, 6, seed=seed, separation=2, max_batch_size=6)
            whole = MinSeparationSampler(24, 6, seed=seed, separation=2, max_batch_size=24)
            (indices, mask), full = cut.sample(3), whole.sample(3)
            kept, drawn = set(indices[mask]), set(full.indices[full.mask])
            assert kept <= drawn
            assert mask.sum() == min(6, full.mask.sum())
            dropped[list(drawn - kept)] += 1
        assert stats.chisquare(dropped).pvalue > 1e-3
        expected = stats.binom.sf(6, 24, 0.25)
        assert cut.describe()["overflow_probability"] == pytest.approx(expected)

    def test_refuses_bad_arguments(self):
        with pytest.raises(
            ValueError, match="`separation` must be an integer of at least 1, got 0"
        ):
            MinSeparationSampler(40, 10, seed=0, separation=0)
        with pytest.raises(ValueError, match="at most `dataset_size`, .* got 5 times 10"):
            MinSeparationSampler(40, 10, seed=0, separation=5)


class TestPrice:
    def test_pld_and_rdp_use_poisson_price_of_eligible_records(self):
        sampler = MinSeparationSampler(1000, 50, seed=0, separation=4)
        assert sampler.participation_probability == pytest.approx(50 / 850)
        run = {"noise_multiplier": 1.0, "steps": 20, "delta": DELTA}
        for accountant in ("pld", "rdp"):
            found = planned_epsilon(sampler=sampler, **run, accountant=accountant)
            poisson = planned_epsilon(sampling_probability=50 / 850, **run, accountant=accountant)
            # A thousandth of δ covers truncated batches.
            assert poisson <= found < 1.001 * poisson
        drawn = planned_epsilon(sampler=sampler, **run, accountant="monte_carlo")
        # Separation is not cheaper than the same number of purely random participations either.
        assert drawn <= planned_epsilon(sampler=sampler, **run)

    def test_full_batches_reveal_more_than_poisson_sampling(self):
        """A record in a full batch replaces another: the exact pair against Poisson sampling."""
        # Batches of one. All others add −1; the record adds 1, or 0 after replacement. The record
        # is drawn with probability 0.01, next to k others, and kept with probability 1 / (k + 1).
        k = np.arange(100)
        others, kept = stats.binom.pmf(k, 99, 0.01), 1 / (k + 1)
        y, step = np.linspace(-9, 10, 4001, retstep=True)
        away = stats.norm.pdf(y[:, None], -np.minimum(k, 1)) @ (others * (1 - 0.01 * kept))
        there = 0.01 * others @ kept
        adding, replaced = (away + there * stats.norm.pdf(y, adds) for adds in (1, 0))
        run = {"noise_multiplier": 1.0, "steps": 1, "delta": DELTA}
        poisson = planned_epsilon(sampling_probability=0.01, **run)
        assert np.maximum(adding - math.exp(poisson) * replaced, 0).sum() * step > 2.5 * DELTA
        full = MinSeparationSampler(100, 1, seed=0, separation=1, max_batch_size=1)
        for accountant in ("pld", "rdp", "monte_carlo"):
            planned = accounting.planned_guarantee(sampler=full, **run, accountant=accountant)
            with pytest.raises(ValueError, match="the sampler's largest batch is full"):
                planned.epsilon(DELTA)

    @pytest.mark.parametrize("accountant", ["pld", "rdp", "monte_carlo"])
    def test_truncated_batches_are_subtracted_from_delta(self, accountant, monkeypatch):
        # Monte Carlo draws depend on δ, and other draws change ε by more than this effect.
        monkeypatch.setattr(
            monte_carlo,
            "epsilon_bound",
            lambda run, delta, **_: event_epsilon(dpa.GaussianDpEvent(10.0), delta),
        )
        sampler = MinSeparationSampler(1000, 20, seed=0, separation=3, max_batch_size=48)
        run = {"noise_multiplier": 1.0, "steps": 10, "delta": DELTA, "accountant": accountant}
        paid = 10 * sampler.full_probability
        assert 1e-7 < paid < 1e-6
        found = planned_epsilon(sampler=sampler, **run)
        never = dataclasses.replace(sampler, max_batch_size=1000)
        assert planned_epsilon(sampler=never, **run) < found
        want = planned_epsilon(sampler=never, **{**run, "delta": DELTA - paid})
        assert found == pytest.approx(want, rel=1e-12)

    @pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
    def test_default_truncation_is_negligible_at_large_epsilon(self, accountant):
        # Charging e^ε times the probability of truncation used up all of δ, which raised an error.
        sampler = MinSeparationSampler(1000, 50, seed=0, separation=4)
        never = dataclasses.replace(sampler, max_batch_size=1000)
        run = {"noise_multiplier": 0.3, "steps": 40, "delta": DELTA, "accountant": accountant}
        found = planned_epsilon(sampler=sampler, **run)
        assert found > 40
        assert found == pytest.approx(planned_epsilon(sampler=never, **run), rel=1e-9)

    def test_full_separation_costs_at_most_composed_gaussian(self):
        sampler = MinSeparationSampler(40, 10, seed=0, separation=4)
        run = {"noise_multiplier": 2.0, "steps": 10, "delta": DELTA, "sampler": sampler}
        gaussian = event_epsilon(dpa.GaussianDpEvent(2.0 / math.sqrt(3)), DELTA)
        assert planned_epsilon(**run) == pytest.approx(gaussian, rel=1e-3)
        assert planned_epsilon(**run, accountant="monte_carlo") < 0.9 * gaussian

    @pytest.mark.slow
    def test_correlated_noise_beats_cyclic_sampling_at_low_noise(self):
        strategy = matrix.BandedToeplitz((1.0, 0.5, 0.25))
        separated = MinSeparationSampler(120, 10, seed=0, separation=3)
        turns = matrix.CyclicPoissonSampler(120, 10, seed=0, cycle_length=3)
        run = {"noise_multiplier": 0.8, "steps": 24, "delta": DELTA}
        cyclic = planned_epsilon(sampler=strategy.under(turns), **run)
        found = planned_epsilon(sampler=strategy.under(separated), **run, accountant="monte_carlo")
        assert found < 0.95 * cyclic
