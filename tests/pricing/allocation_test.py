"""Tests of random allocation: draws and prices, against exact counts and brute force."""

import collections
import dataclasses
import itertools
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import pld
from scipy import special, stats

import dpoptax
from dpoptax import accounting, matrix
from dpoptax._pricing import accountants, random_allocation
from dpoptax._pricing.custom_events import (
    RandomAllocationDpEvent,
    allocation_event,
    banded_allocation_event,
    cut_event,
)
from dpoptax.sampling import PoissonSampler, RandomAllocationSampler
from tests.helpers import after_releases, event_epsilon, planned_epsilon

DELTA = 1e-5


def participation(sampler, index=0):
    """Returns a (T, N) 0/1 matrix of the records in each step of a period."""
    found = np.zeros((sampler.period, sampler.dataset_size), int)
    for t in range(sampler.period):
        indices, mask = sampler.sample(index * sampler.period + t)
        np.add.at(found[t], indices[mask], 1)
    return found


class TestDraws:
    @pytest.mark.parametrize(
        ("size", "batch", "k"),
        [(1, 1, 1), (6, 2, 1), (7, 3, 2), (5, 5, 3), (40, 10, 3), (9, 1, 4), (6000, 400, 2)],
    )
    def test_records_are_in_exactly_k_steps_per_period(self, size, batch, k):
        sampler = RandomAllocationSampler(size, batch, seed=3, participations=k)
        assert sampler.period == math.ceil(k * size / batch)
        first, second = participation(sampler, 0), participation(sampler, 1)
        assert first.max() == 1
        for drawn in (first, second):
            np.testing.assert_array_equal(drawn.sum(axis=0), k)
        assert size < 6 or batch == size or not np.array_equal(first, second)

    @pytest.mark.parametrize("cipher", [False, True])
    def test_sets_of_steps_are_uniform_and_records_independent(self, cipher):
        # Two halves of the records, so that the joint law of pairs is also counted.
        sets, pairs = collections.Counter(), collections.Counter()
        for seed in (bytes([i]) * 32 if cipher else i for i in range(200)):
            drawn = participation(RandomAllocationSampler(8, 4, seed=seed, participations=2))
            names = [tuple(column) for column in drawn.T]
            sets.update(names)
            pairs.update(itertools.pairwise(names))
        assert len(sets) == 6
        assert stats.chisquare(list(sets.values())).pvalue > 1e-3
        assert len(pairs) == 36
        # Pairs that share a record are nearly independent.
        assert stats.chisquare(list(pairs.values())).pvalue > 1e-3

    def test_batch_sizes_are_binomial(self):
        counts = [
            int(RandomAllocationSampler(40, 10, seed=seed).sample(2).mask.sum())
            for seed in range(600)
        ]
        edges = np.array([-1, 6, 8, 9, 10, 11, 13, 40]) + 0.5
        observed = np.histogram(counts, edges)[0]
        expected = 600 * np.diff(stats.binom.cdf(edges - 0.5, 40, 0.25))
        assert stats.chisquare(observed, expected).pvalue > 1e-3
        # Batches dealt out evenly, all of size 10, have another law.
        assert stats.chisquare(np.histogram([10] * 600, edges)[0], expected).pvalue < 1e-6

    def test_overflowing_draws_keep_a_uniform_subset(self):
        kept = np.zeros(40, int)
        # Records kept by their place instead of at random would be kept in all 500 draws or none.
        for seed in range(500):
            sampler = RandomAllocationSampler(40, 10, seed=seed, max_batch_size=10)
            indices, mask = sampler.sample(0)
            whole = dataclasses.replace(sampler, max_batch_size=40).sample(0)
            assert set(indices[mask]) <= set(whole.indices[whole.mask])
            assert mask.sum() == min(10, whole.mask.sum())
            kept[indices[mask]] += 1
        assert stats.chisquare(kept).pvalue > 1e-3
        cut = stats.binom.sf(10, 40, 0.25)
        assert sampler.describe()["overflow_probability"] == pytest.approx(cut)

    def test_padding_makes_overflow_rare(self):
        sampler = RandomAllocationSampler(10**6, 100, seed=0)
        assert 1e-20 < sampler.overflow_probability <= 1e-18
        longer = stats.binom.sf(sampler.padded_size - 1, 10**6, 1e-4)
        assert longer > 1e-18
        assert sampler.padded_size < 2.1 * 100

    def test_refuses_bad_arguments(self):
        with pytest.raises(
            ValueError, match="`participations` must be an integer of at least 1, got 0"
        ):
            RandomAllocationSampler(40, 10, seed=0, participations=0)
        with pytest.raises(ValueError, match="`max_batch_size` must be between .* got 9"):
            RandomAllocationSampler(40, 10, seed=0, max_batch_size=9)


def deltas(sigma, period, steps, epsilons, interval=1e-4):
    """Returns δ(P‖Q) and δ(Q‖P) of the code's dominating pair, (2, epsilons)."""
    made = random_allocation.pair(sigma, period, steps, interval)
    return np.array(
        [
            [pmf.get_delta_for_epsilon(e) for e in epsilons]
            for pmf in (made._pmf_remove, made._pmf_add)
        ]
    )


def integrated_deltas(sigma, epsilons):
    """Returns the same for T = 2, by quadrature of the densities over both coordinates."""
    step = 0.01 * sigma
    x = np.arange(-9 * sigma, 1 + 9 * sigma, step)
    zero, one = stats.norm.pdf(x, 0, sigma), stats.norm.pdf(x, 1, sigma)
    p = (np.outer(one, zero) + np.outer(zero, one)) / 2
    q = np.outer(zero, zero)
    return np.array(
        [
            [np.maximum(a - math.exp(e) * b, 0).sum() * step**2 for e in epsilons]
            for a, b in ((p, q), (q, p))
        ]
    )


def sampled_ratios(sigma, period, participations, size, seed):
    """Samples L under Q and P by definition, as a mean over all sets of `participations` steps."""
    sets = np.array(list(itertools.combinations(range(period), participations)))
    rng = np.random.default_rng(seed)
    noise = rng.normal(0, sigma, (size, period))
    with_record = noise.copy()
    with_record[np.arange(size)[:, None], sets[rng.integers(len(sets), size=size)]] += 1

    def ratio(x):
        log_w = (2 * x - 1) / (2 * sigma**2)
        return np.exp(log_w[:, sets].sum(axis=2)).mean(axis=1)

    return ratio(noise), ratio(with_record)


def sampled_delta(under_q, under_p, epsilon):
    """Returns δ in both directions, with standard errors."""
    rows = (
        np.maximum(1 - math.exp(epsilon) / under_p, 0),
        np.maximum(1 - math.exp(epsilon) * under_q, 0),
    )
    return [(row.mean(), row.std() / math.sqrt(len(row))) for row in rows]


class TestLoss:
    @pytest.mark.parametrize(("sigma", "epsilons"), [(1.0, (0.3, 1, 2.5)), (0.5, (0.5, 2, 6))])
    def test_two_steps_match_quadrature(self, sigma, epsilons):
        ours, exact = deltas(sigma, 2, 2, epsilons), integrated_deltas(sigma, epsilons)
        assert np.all(ours >= exact * (1 - 1e-4))
        np.testing.assert_allclose(ours, exact, rtol=5e-3)

    def test_many_steps_match_samples(self):
        sigma, period, epsilons = 0.7, 12, (0.5, 1, 2)
        ratios = sampled_ratios(sigma, period, 1, 150_000, seed=1)
        for epsilon, ours in zip(epsilons, deltas(sigma, period, period, epsilons).T, strict=True):
            for bound, (mean, error) in zip(ours, sampled_delta(*ratios, epsilon), strict=True):
                assert abs(bound - mean) < 4.5 * error + 3e-3 * mean

    def test_first_step_is_poisson_sampling(self):
        sigma, period = 1.0, 100
        own = pld.privacy_loss_distribution.from_gaussian_mechanism(
            sigma, sampling_prob=1 / period, value_discretization_interval=1e-4
        )
        epsilons = (0.1, 0.5, 1.0)
        theirs = [
            [pmf.get_delta_for_epsilon(e) for e in epsilons]
            for pmf in (own._pmf_remove, own._pmf_add)
        ]
        np.testing.assert_allclose(
            deltas(sigma, period, 1, epsilons), theirs, rtol=3e-3, atol=1e-15
        )

    @pytest.mark.parametrize("sigma", [0.446, 0.953, 2.302, 5.482])
    def test_proves_deltas_below_double_precision(self, sigma):
        """Mass outside the grid is not lost when the sum rounds to 1."""
        delta, q = 2.0**-64, 0.5
        event = RandomAllocationDpEvent(noise_multiplier=sigma, period=2, steps=1)
        # If rounding puts the sum below 1, no ε is proved.
        odds = math.exp(min(price(event, delta=delta), 700.0)) - 1 + q
        edge = sigma**2 * math.log(odds / q) + 0.5  # a step of Poisson sampling has ratio e^ε here
        there, away = stats.norm.sf(edge - 1, scale=sigma), stats.norm.sf(edge, scale=sigma)
        assert q * there - odds * away <= delta

    def test_finer_law_gives_tighter_bound(self):
        rough, fine = (
            random_allocation.pair(1.0, 50, 50, 1e-4, points).get_epsilon_for_delta(DELTA)
            for points in (200, 1000)
        )
        assert fine < rough < 1.05 * fine

    def test_law_keeps_mean_over_all_steps(self):
        law = random_allocation.ratio_law(0.8, 300, 250)
        assert math.fsum(law.masses) == pytest.approx(1, abs=1e-12)
        assert math.fsum(law.masses * law.values) == pytest.approx(300, rel=1e-12)


def price(event, accountant="pld", relation="replace-special", delta=DELTA):
    return event_epsilon(event, delta, accountant=accountant, neighboring_relation=relation)


class TestPrice:
    def test_k_of_t_costs_no_more_than_k_blocks(self):
        event = allocation_event(1.0, 8, period=8, participations=2, overflow=0)
        made = random_allocation.pair(1.0, 4, 4, 1e-4).self_compose(2)
        assert price(event) == pytest.approx(made.get_epsilon_for_delta(DELTA), rel=1e-6)
        ratios = sampled_ratios(1.0, 8, 2, 200_000, seed=5)
        for pmf, (mean, error) in zip(
            (made._pmf_remove, made._pmf_add), sampled_delta(*ratios, 1.0), strict=True
        ):
            assert mean - 4.5 * error < pmf.get_delta_for_epsilon(1.0) < 1.3 * mean

    def test_part_of_k_of_t_is_priced_as_a_whole(self):
        part, whole = (
            price(allocation_event(2.0, steps, period=9, participations=2, overflow=0))
            for steps in (1, 9)
        )
        assert part == whole

    def test_extreme_noise_is_clamped_or_not_amplified(self):
        made = allocation_event(0.2, 10, period=10, participations=1, overflow=1e-3)
        assert price(made, "rdp") == pytest.approx(price(dpa.GaussianDpEvent(0.2), "rdp"))
        large = allocation_event(1e8, 10, period=10, participations=1, overflow=0)
        assert large.event.noise_multiplier == random_allocation.AMPLIFIED_MULTIPLIERS[1]
        assert isinstance(
            allocation_event(1e-4, 10, period=10, participations=1, overflow=0),
            dpa.NonPrivateDpEvent,
        )
        assert price(allocation_event(1.0, 0, period=10, participations=1, overflow=0)) == 0

    def test_full_batches_are_unamplified(self):
        sampler = RandomAllocationSampler(20, 20, seed=0)
        assert price(sampler.dp_event(2.0, 4)) == pytest.approx(
            price(dpa.GaussianDpEvent(1.0)), rel=1e-6
        )

    def test_overflow_of_batches_is_subtracted_from_delta(self):
        def event(overflow):
            return cut_event(RandomAllocationDpEvent(4.0, 20, 20), overflow)

        free, paid = price(event(0.0)), price(event(1e-7))
        assert paid == price(event(0.0), delta=DELTA - 1e-7)
        assert paid > free
        with pytest.raises(ValueError, match="`delta` must be above 1e-05.*largest batch is full"):
            price(event(1e-5))
        # For a sampler: a union bound over the steps of the period.
        sampler = RandomAllocationSampler(1000, 100, seed=0, max_batch_size=160)
        inner = sampler.dp_event(1.0, 10).event
        assert inner.overflow == pytest.approx(10 * stats.binom.sf(159, 1000, 0.1))
        # Truncation in a step that is not released costs nothing.
        _, rest = sampler.dp_event(1.0, 13).events
        assert rest.overflow == pytest.approx(3 * stats.binom.sf(159, 1000, 0.1))

    @pytest.mark.parametrize(("size", "batch"), [(16, 8), (24, 12), (20, 2)])
    def test_few_users_need_no_delta_for_cuts_that_cannot_happen(self, size, batch):
        """The largest batch holds all records, so nothing is cut and δ covers nothing."""
        sampler = RandomAllocationSampler(size, batch, seed=0)
        found = accounting.planned_guarantee(
            noise_multiplier=4.0, steps=sampler.period, sampler=sampler, delta=1e-5
        )
        largest = max(sampler.sample(t).mask.sum() for t in range(200 * sampler.period))
        assert largest <= sampler.padded_size
        if sampler.padded_size >= size:
            assert sampler.full_probability == 0
            uncut = RandomAllocationDpEvent(4.0, sampler.period, sampler.period)
            assert found.epsilon(1e-12) == pytest.approx(price(uncut, delta=1e-12))
        smaller = RandomAllocationSampler(size, batch, seed=0, max_batch_size=size - 1)
        assert smaller.full_probability > 0

    def test_accountants_refuse_what_they_do_not_support(self):
        event = RandomAllocationDpEvent(1.0, 20, 20)
        for accountant, relation in (("pld", "replace-one"), ("rdp", "replace-special")):
            with pytest.raises(ValueError, match="does not support the event RandomAllocation"):
                price(event, accountant, relation)
        relation = dpa.NeighboringRelation.REPLACE_SPECIAL
        cut = cut_event(event, 1e-9)
        with pytest.raises(ValueError, match="does not support the event"):
            accountants._privacy_losses(((cut, 1),), ((event, 1),), DELTA, relation, 1e-4)


def released(noises, steps):
    """Returns states of noise stages after the given numbers of releases."""
    return tuple(
        after_releases(noise, jnp.zeros(3), count)
        for noise, count in zip(noises, steps, strict=True)
    )


class TestLedger:
    def noises(self):
        return [
            dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=10, key=jax.random.key(i))
            for i in range(2)
        ]

    def test_partial_epoch_is_priced_as_its_released_steps(self):
        sampler = RandomAllocationSampler(100, 10, seed=0)
        with pytest.warns(UserWarning, match="not below 1/N"):
            spent = accounting.guarantee(released(self.noises()[:1], [3]), sampler).epsilon(0.02)
        event = sampler.dp_event(2.0, 3)
        assert (event.event.period, event.event.steps) == (10, 3)
        assert spent == planned_epsilon(noise_multiplier=2.0, steps=3, sampler=sampler, delta=0.02)

    def test_refuses_stages_with_different_numbers_of_releases(self):
        state = released(self.noises(), [1, 2])
        with pytest.raises(ValueError, match="steps of a RandomAllocationSampler depend"):
            accounting.guarantee(state, RandomAllocationSampler(100, 10, seed=0)).epsilon(1e-3)
        # With two groups, every second step belongs to one of them.
        with pytest.raises(ValueError, match="steps of a CyclicPoissonSampler depend"):
            accounting.guarantee(
                state, matrix.CyclicPoissonSampler(100, 10, seed=0, cycle_length=2)
            ).epsilon(1e-3)
        without_turns = matrix.CyclicPoissonSampler(100, 10, seed=0)
        for sampler in (PoissonSampler(100, 10, seed=0), without_turns):
            assert accounting.guarantee(state, sampler, accountant="rdp").epsilon(1e-3) > 0

    def test_alternating_stages_are_priced_at_least_noise(self):
        """With two groups, one stage may have all steps of a record."""
        noises = [
            dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=10, key=jax.random.key(i))
            for i, sigma in enumerate((8.0, 80.0))
        ]
        state, delta = released(noises, [4, 4]), 1e-3
        met = event_epsilon(dpa.SelfComposedDpEvent(dpa.GaussianDpEvent(8.0), 4), delta)
        turns = matrix.CyclicPoissonSampler(20, 10, seed=0, cycle_length=2)
        assert accounting.guarantee(state, turns).epsilon(delta) >= met * (1 - 1e-9)
        # If steps are independent, no alternation is worse than both stages in each step.
        poisson = PoissonSampler(20, 10, seed=0)
        joint = dpa.SelfComposedDpEvent(poisson.dp_event((1 / 64 + 1 / 6400) ** -0.5, 1), 4)
        assert accounting.guarantee(state, poisson).epsilon(delta) == pytest.approx(
            event_epsilon(joint, delta)
        )


class TestBandedNoise:
    """Prices of correlated noise whose orthogonal columns are revealed up to a residue."""

    COLUMN = np.array([0.8, 0.5, 0.3])

    def event(self, periods=3, period=13, sigma=1.0, overflow=0.0):
        column = self.COLUMN.tolist()
        run = {"column": column, "period": period, "overflow": overflow}
        return banded_allocation_event(sigma, period * periods, **run)

    def test_every_residue_is_dominated(self):
        """The Gram matrix of the possible columns is at most the diagonal of the event."""
        made = self.event().event
        inner, edge = made.noise_multiplier**-2, made.edge_multiplier**-2
        assert (made.period, made.steps) == (4, 4)
        columns = np.array([np.pad(self.COLUMN, (t, 38 - t)) for t in range(39)])
        largest = 0.0
        for residues in itertools.product(range(3), repeat=3):
            slots = [13 * e + np.arange(r, 13, 3) for e, r in enumerate(residues)]
            at = np.concatenate(slots)
            price = np.full(39, inner)
            price[[slot[[0, -1]] for slot in slots]] = edge
            scaled = columns[at] / np.sqrt(price[at])[:, None]
            largest = max(largest, np.linalg.eigvalsh(scaled @ scaled.T)[-1])
        assert 1 - 1e-6 < largest <= 1 + 1e-9

    def test_pair_with_edges_matches_quadrature(self):
        sigma, edge, epsilons = 1.2, 0.9, np.array([0.0, 0.3, 0.8, 1.5])
        z = np.linspace(-7, 9, 161)
        q = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
        inner, outer = (np.exp(z / s - 1 / (2 * s * s)) for s in (sigma, edge))
        ratio = (inner[:, None, None] + outer[:, None] + outer) / 3
        mass = q[:, None, None] * q[:, None] * q
        odds = np.exp(epsilons)[:, None, None, None]
        exact = [
            np.sum(mass * np.maximum(found, 0), axis=(1, 2, 3))
            for found in (ratio - odds, 1 - odds * ratio)
        ]
        made = random_allocation.pair(sigma, 3, 3, 1e-4, edge=edge)
        both = [pmf.get_delta_for_epsilon(epsilons) for pmf in (made._pmf_remove, made._pmf_add)]
        np.testing.assert_allclose(both, exact, rtol=2e-3, atol=1e-7)

    def test_price_is_above_the_simulated_run(self):
        """The true mixture over two periods, by its samples."""
        sigma, period = 1.0, 13
        event = self.event(periods=2, sigma=sigma)
        strategy = np.array([np.pad(self.COLUMN, (t, 28 - t))[:26] for t in range(26)])
        pairs = np.array(list(itertools.product(range(period), range(period, 26))))
        centers = strategy[pairs].sum(axis=1)
        rng = np.random.default_rng(0)
        outputs = centers[rng.integers(len(pairs), size=20_000)]
        outputs = outputs + sigma * rng.normal(size=outputs.shape)
        logs = (outputs @ centers.T - (centers**2).sum(1) / 2) / sigma**2
        losses = special.logsumexp(logs, axis=1) - math.log(len(pairs))
        revealed = dpa.GaussianDpEvent(sigma / np.linalg.norm(centers, axis=1).max())
        relation = dpa.NeighboringRelation.REPLACE_SPECIAL
        for epsilon in (0.5, 1.0, 2.0):
            gains = np.maximum(-np.expm1(epsilon - losses), 0)
            least = gains.mean() - 3 * gains.std() / math.sqrt(len(gains))
            price, worst = (
                accountants.delta_of(each, epsilon, "pld", relation) for each in (event, revealed)
            )
            assert least < price < 0.8 * worst

    def test_strategy_under_allocation_is_amplified(self):
        strategy = matrix.BandedToeplitz((0.8, 0.5, 0.3))
        sampler = RandomAllocationSampler(1300, 100, seed=0)
        made = strategy.under(sampler).dp_event(1.0, 30)
        assert made.count == 3
        sums = made.event.event
        assert sums.edge_multiplier < sums.noise_multiplier
        assert strategy.under(sampler).dp_event(1.0, 13).event.event.edge_multiplier is None
        in_turns = matrix.CyclicPoissonSampler(1300, 100, seed=0, cycle_length=13)
        revealed = strategy.under(in_turns).dp_event(1.0, 30)
        assert price(made) < 0.8 * price(revealed)

    def test_little_noise_is_priced_as_if_all_steps_were_known(self):
        """The greatest norm of the columns' sum over three periods, by trying all steps."""
        event = self.event(sigma=0.25)
        columns = np.array([np.pad(self.COLUMN, (t, 38 - t)) for t in range(39)])
        places = itertools.product(range(13), range(13, 26), range(26, 39))
        greatest = max(np.linalg.norm(columns[list(steps)].sum(0)) for steps in places)
        assert price(event) >= price(dpa.GaussianDpEvent(0.25 / greatest))
        assert event.event == dpa.GaussianDpEvent(self.event().event.edge_multiplier / 4)
        assert self.event(sigma=0.0) == dpa.NonPrivateDpEvent()
        assert self.event(sigma=math.inf) == dpa.NoOpDpEvent()

    def test_overflow_of_batches_is_subtracted_from_delta(self):
        free = price(self.event(), delta=DELTA - 39 * 1e-8)
        assert price(self.event(overflow=1e-8)) == pytest.approx(free, rel=1e-9)
        with pytest.raises(ValueError, match="`delta` must be above .*largest batch is full"):
            price(self.event(overflow=1e-6))

    @pytest.mark.parametrize(
        ("strategy", "changed", "message"),
        [
            (matrix.BandedToeplitz((0.8, 0.5, 0.3)), {"participations": 2}, "with 3 bands"),
            (matrix.BandedToeplitz((0.8, 0.5, 0.3)), {"batch_size": 120}, "at least 4 steps for"),
            (matrix.BufferedToeplitz((0.5,), (0.4,), steps=30), {}, "with all bands"),
            (matrix.BandedToeplitz((0.8, -0.5)), {}, "must not be negative .* of -0.53"),
        ],
    )
    def test_refuses_other_runs(self, strategy, changed, message):
        sampler = RandomAllocationSampler(**{"dataset_size": 1300, "batch_size": 100} | changed)
        with pytest.raises(ValueError, match=message):
            strategy.under(sampler)
