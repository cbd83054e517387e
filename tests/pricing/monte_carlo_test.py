"""Tests of privacy by Monte Carlo: pair, estimator and confidence, against brute force."""

import dataclasses
import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import stats

from dpoptax import accounting, matrix
from dpoptax._pricing import accountants, importance_sampling, monte_carlo, participation_chains
from dpoptax._pricing.importance_sampling import ADD, REMOVE, Proposal, Run, draw
from dpoptax._pricing.participation_chains import AllocationChain, SeparatedChain
from dpoptax.sampling import MinSeparationSampler, PoissonSampler, RandomAllocationSampler
from tests.helpers import planned_epsilon

DELTA = 1e-5
RELATION = dpa.NeighboringRelation.REPLACE_SPECIAL
epsilon_bound = monte_carlo.epsilon_bound.__wrapped__  # without its cache
# Chain, column, steps: k of T, 1 of T over two periods with bands across them, and separation.
SMALL = {
    "1 of 2": (AllocationChain(2, 1), (0.8, 0.6), 2),
    "2 of 3": (AllocationChain(3, 2), (0.9, 0.4), 3),
    "1 of 2, twice": (AllocationChain(2, 1), (0.8, 0.5, 0.3), 4),
    "separated": (SeparatedChain(2, 0.4), (0.8, 0.6), 3),
}


def paths(chain, steps):
    """Returns {x: probability} from the definition of the chain."""
    found = {((), state): chance for state, chance in chain.start().items()}
    for step in range(steps):
        grown = {}
        for (x, state), chance in found.items():
            probability, taking, leaving = chain.move(step, state)
            for bit, share, after in ((1, probability, taking), (0, 1 - probability, leaving)):
                key = ((*x, bit), after)
                grown[key] = grown.get(key, 0.0) + chance * share
        found = grown
    total = {}
    for (x, _), chance in found.items():
        total[x] = total.get(x, 0.0) + chance
    return {x: chance for x, chance in total.items() if chance > 0}


def toeplitz(column, steps):
    full = np.zeros(steps)
    full[: len(column)] = column[:steps]
    return np.array([[full[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)])


def mixture(case):
    """Returns the centers C x and their weights."""
    chain, column, steps = case
    law = paths(chain, steps)
    return np.array(list(law)) @ toeplitz(column, steps).T, np.array(list(law.values()))


def quadrature(centers, weights, sigma, epsilons, points=81):
    """Returns δ(P‖Q) and δ(Q‖P) of the mixture of N(centers, σ²I), summed on a grid."""
    steps = centers.shape[1]
    axes = [np.linspace(-7 * sigma, centers[:, t].max() + 7 * sigma, points) for t in range(steps)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, steps)
    cell = math.prod(axis[1] - axis[0] for axis in axes)
    q = np.exp(-(grid**2).sum(1) / (2 * sigma**2)) / (2 * math.pi * sigma**2) ** (steps / 2)
    logs = (grid @ centers.T - (centers**2).sum(1) / 2) / sigma**2
    p = q * (np.exp(logs) @ weights)
    return np.array(
        [
            [np.maximum(a - math.exp(e) * b, 0).sum() * cell for e in epsilons]
            for a, b in ((p, q), (q, p))
        ]
    )


def true_epsilon(centers, weights, sigma, delta, points=81):
    """Returns the larger ε at δ of the two directions, by interpolation of log δ."""
    epsilons = np.linspace(0, 6 / sigma, 61)
    deltas = quadrature(centers, weights, sigma, epsilons, points).max(axis=0)
    return float(np.interp(-math.log(delta), -np.log(deltas), epsilons))


@pytest.mark.parametrize("name", SMALL)
def test_lattice_moments_match_enumeration(name):
    case = SMALL[name]
    centers, weights = mixture(case)
    single = participation_chains.lattice(*case)
    assert single.greatest_norm() == pytest.approx(np.linalg.norm(centers, axis=1).max())
    for power in (2.5, -0.7):
        exponents = (power**2 - power) * (centers**2).sum(1) / (2 * 1.3**2)
        expected = math.log(weights @ np.exp(exponents))
        assert single.log_moment(power, 1.3)[0] == pytest.approx(expected, rel=1e-12)
        inner = power**2 * centers @ centers.T / 1.3**2
        pairs = inner + exponents[:, None] + exponents
        expected = math.log(weights @ np.exp(pairs) @ weights)
        assert participation_chains.copied(*case, 2).log_moment(power, 1.3)[0] == pytest.approx(
            expected
        )


@pytest.mark.parametrize(
    "name",
    ["1 of 2", "separated", *(pytest.param(n, marks=pytest.mark.slow) for n in list(SMALL)[1:3])],
)
@pytest.mark.parametrize(
    ("direction", "power", "copies"),
    [(REMOVE, 1.0, 1), (REMOVE, 1.6, 1), (REMOVE, 1.0, 3), (ADD, 0.0, 1), (ADD, -0.6, 2)],
)
def test_proposal_draws_are_unbiased_and_bounded(name, direction, power, copies):
    case = SMALL[name]
    centers, weights = mixture(case)
    run, sigma = Run(*case, 1.1), 1.1
    log_z = run.lattice(copies).log_moment(power, sigma)[0]
    proposal = Proposal(direction, power, copies, log_z)
    points = {2: 161, 3: 81, 4: 31}[case[2]]
    truth = quadrature(centers, weights, sigma, [0.5, 1.5], points)[direction]
    losses = draw(run, proposal, 2**15, seed=7)
    for epsilon, expected in zip((0.5, 1.5), truth, strict=True):
        values = losses.values(epsilon)
        assert values.min() >= 0
        assert values.max() <= math.exp(proposal.log_bound(epsilon)) + 1e-12
        error = values.std() / math.sqrt(len(values))
        # The grid for four steps has a relative error of about 0.001.
        assert abs(values.mean() - expected) <= 4.5 * error + 2e-3 * expected


@pytest.mark.parametrize(
    "name", ["1 of 2", "separated", pytest.param("2 of 3", marks=pytest.mark.slow)]
)
def test_epsilon_is_slightly_above_true_epsilon(name):
    case, sigma, delta = SMALL[name], 1.1, 1e-4
    centers, weights = mixture(case)
    truth = true_epsilon(centers, weights, sigma, delta, 161 if case[2] == 2 else 121)
    found = epsilon_bound(Run(*case, sigma), delta, most=50.0)
    assert truth < found < 1.03 * truth
    # Half of the noise refutes the claim.
    halved = quadrature(centers, weights, sigma / 2, [found])
    assert halved.max() > 10 * delta


def test_refuses_negative_strategy_entry():
    """Opposite contributions of two steps add up, so a pair with a negative entry fails."""
    with pytest.raises(ValueError, match="at random, got an entry of -0.5"):
        participation_chains.lattice(AllocationChain(4, 1), (1.0, -0.5), 4)


def test_wealth_test_has_stated_failure_probability():
    rng = np.random.default_rng(0)
    proposal = Proposal(REMOVE, 1.0, 1, 0.0)
    failure, wrong, right = 0.05, 0, 0
    for shape in ((0.02, 1.0), (0.3, 0.05)):
        odds, size = shape
        mean = odds * size
        for _ in range(1500):
            values = size * (rng.random(1000) < odds)
            bet = min(math.sqrt(-2 * math.log(failure) / (1000 * mean * size)), 1 / size)
            # A claim that δ is below its true value, and a claim that it is below twice that value.
            for times in (1.0, 2.0):
                test = monte_carlo.Test(proposal, times * mean, 0.0, 1000, bet)
                passed = test.log_wealth(values[values > 0]) >= -math.log(failure)
                wrong += passed and times == 1.0
                right += passed and times == 2.0
    assert stats.binomtest(wrong, 3000, failure, alternative="greater").pvalue > 1e-3
    assert wrong > 0
    assert right > 1500


@pytest.mark.slow
def test_certificate_has_stated_failure_probability(monkeypatch):
    """Uses a failure probability of 0.1 instead of 10^-11, and new draws each time."""
    delta = 1e-3
    centers, weights = mixture(SMALL["1 of 2"])
    run, failed = Run(*SMALL["1 of 2"], 1.1), 0
    truth = true_epsilon(centers, weights, 1.1, delta, 401)
    monkeypatch.setattr(monte_carlo, "FAILURE", 0.1 / delta)
    monkeypatch.setattr(monte_carlo, "RESERVED", 0.0)
    for seed in range(200):
        monkeypatch.setattr(importance_sampling, "_SEED", seed)
        failed += epsilon_bound(run, delta, most=50.0, effort=1e-3) < truth * (1 - 1e-4)
    assert stats.binomtest(failed, 200, 0.1, alternative="greater").pvalue > 1e-3


def test_each_query_has_separate_draws(monkeypatch):
    """Each query has its own draws; a calibration would select values that shared draws favor."""
    drawn = []

    def kept(*args, **kwargs):
        drawn.append((kwargs["seed"][0], draw(*args, **{**kwargs, "least": None})))
        return draw(*args, **kwargs)

    monkeypatch.setattr(monte_carlo, "draw", kept)
    run = Run(*SMALL["1 of 2"], 1.1)
    others = dataclasses.replace(run, sigma=1.1 * (1 + 1e-9)), run
    for asked, delta in ((run, 1e-3), (others[0], 1e-3), (others[1], 1.001e-3), (run, 1e-3)):
        epsilon_bound(asked, delta, most=50.0, effort=1e-3)
    tests = [losses for kind, losses in drawn if kind == "test"]
    first, sigma, by_delta, again = (losses.log_ratios[: 2**14] for losses in tests[::2])
    np.testing.assert_array_equal(again, first)
    for other in (sigma, by_delta):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.05


class TestAgainstKnownPrices:
    @staticmethod
    def prices(sampler, steps, sigma, delta=DELTA):
        run = {"noise_multiplier": sigma, "steps": steps, "delta": delta, "sampler": sampler}
        return planned_epsilon(**run), planned_epsilon(**run, accountant="monte_carlo")

    @pytest.mark.slow
    def test_balls_in_bins_matches_composed_price(self):
        composed, drawn = self.prices(RandomAllocationSampler(100, 10, seed=0), 30, 1.0)
        # The proven bound exceeds the true value because of its grids.
        assert 0.998 * composed < drawn < 1.02 * composed

    def test_single_step_is_poisson_sampling(self):
        sampler = RandomAllocationSampler(100, 10, seed=0, participations=2)
        drawn = self.prices(sampler, 1, 1.0)[1]
        poisson = planned_epsilon(noise_multiplier=1.0, steps=1, sampling_probability=0.1)
        # With other draws, e.g. for another δ, it is 1.015 to 1.021 times as large.
        assert poisson <= drawn < 1.03 * poisson

    @pytest.mark.slow
    def test_no_separation_is_poisson_sampling(self):
        sampler = MinSeparationSampler(100, 10, seed=0)
        composed, drawn = self.prices(sampler, 20, 1.0)
        poisson = planned_epsilon(noise_multiplier=1.0, steps=20, sampling_probability=0.1)
        # A thousandth of δ covers truncation, which has probability 10⁻¹⁸ per step.
        assert poisson <= drawn == composed <= poisson * (1 + 2e-4)
        # The accountant takes the smaller of the two; without it, the drawn bound is just above.
        alone = epsilon_bound(Run(sampler.chain, (1.0,), 20, 1.0), DELTA, most=2 * poisson)
        assert poisson < alone < 1.03 * poisson

    @pytest.mark.slow
    def test_price_never_exceeds_worst_case_gaussian(self):
        strategy = matrix.BandedToeplitz((1.0, 0.5))
        sampler = RandomAllocationSampler(20, 10, seed=0)
        for sigma in (0.2, 1.0, 30.0):
            composed, drawn = self.prices(strategy.under(sampler), 4, sigma)
            assert drawn <= composed
        # Full batches are not random.
        full = strategy.under(RandomAllocationSampler(10, 10, seed=0))
        composed, drawn = self.prices(full, 4, 1.0)
        assert 0.999 * composed < drawn <= composed

    def test_sensitivity_is_maximum_over_participations(self):
        strategy = matrix.BandedToeplitz((1.0, 0.5, 0.2))
        sampler = RandomAllocationSampler(30, 10, seed=0, participations=2)
        centers, _ = mixture((AllocationChain(6, 2), strategy.coefficients, 8))
        found = strategy.under(sampler).sensitivity(8)
        assert found == pytest.approx(np.linalg.norm(centers, axis=1).max())
        made = strategy.under(sampler).dp_event(2.0, 8)
        assert accountants.epsilon_of(made, DELTA, "pld", RELATION) == pytest.approx(
            accountants.epsilon_of(dpa.GaussianDpEvent(2.0 / found), DELTA, "pld", RELATION)
        )


class TestUse:
    PRICED = matrix.BandedToeplitz((1.0, 0.5)).under(RandomAllocationSampler(60, 10, seed=0))

    @pytest.mark.slow
    def test_calibrated_noise_spends_target_epsilon(self):
        run = {"steps": 12, "delta": DELTA, "sampler": self.PRICED, "accountant": "monte_carlo"}
        sigma = accounting.calibrate(epsilon=2.0, **run)
        spent = planned_epsilon(noise_multiplier=sigma, **run)
        assert 0.98 * 2.0 < spent <= 2.0

    @pytest.mark.slow
    def test_price_is_deterministic(self):
        run = {"noise_multiplier": 1.0, "steps": 12, "delta": DELTA, "accountant": "monte_carlo"}
        other = matrix.BandedToeplitz((1.0, 0.5)).under(RandomAllocationSampler(60, 10, seed=9))
        first = planned_epsilon(sampler=self.PRICED, **run)
        monte_carlo.epsilon_bound.cache_clear()
        importance_sampling.best_proposal.cache_clear()
        assert planned_epsilon(sampler=other, **run) == first

    def test_overflow_of_batches_is_charged(self):
        run = {"noise_multiplier": 1.0, "steps": 12, "delta": DELTA, "accountant": "monte_carlo"}
        event = self.PRICED.dp_event(1.0, 12)
        # Full batches are more frequent than truncation, which has probability 10⁻¹⁸ per step.
        assert event.overflow == 12 * self.PRICED.sampler.full_probability < 1e-15
        free = planned_epsilon(sampler=self.PRICED, **run)
        # If overflow is too frequent, the "pld" bound remains, regardless of truncation in a full
        # batch.
        full = dataclasses.replace(self.PRICED.sampler, max_batch_size=12)
        costly = dataclasses.replace(self.PRICED, sampler=full)
        unamplified = planned_epsilon(sampler=costly, **{**run, "accountant": "pld"})
        assert free < planned_epsilon(sampler=costly, **run) == unamplified

    def test_refuses_unsupported_events(self):
        run = {"noise_multiplier": 1.0, "steps": 12, "delta": DELTA, "accountant": "monte_carlo"}
        with pytest.raises(ValueError, match="got 'monte_carlo' for an event of type"):
            planned_epsilon(sampler=PoissonSampler(60, 10), **run)
        event = self.PRICED.dp_event(1.0, 12)
        with pytest.raises(ValueError, match="except for one run with a"):
            accountants.epsilon_of(
                dpa.SelfComposedDpEvent(event, 2), DELTA, "monte_carlo", RELATION
            )
        replaced = dpa.NeighboringRelation.REPLACE_ONE
        with pytest.raises(ValueError, match="must be the sampler's for accountant='monte_carlo'"):
            accountants.epsilon_of(event, DELTA, "monte_carlo", replaced)
        # Two runs compose by their bounds.
        twice = accountants.epsilon_of(dpa.SelfComposedDpEvent(event, 2), DELTA, "pld", RELATION)
        assert twice > accountants.epsilon_of(event, DELTA, "pld", RELATION)

    def test_prices_full_strategy_if_it_has_few_states(self):
        sampler = RandomAllocationSampler(60, 10, seed=0)
        strategy = matrix.BandedInverseToeplitz((1.0, -0.5), steps=6)
        run = {"noise_multiplier": 1.0, "steps": 6, "delta": DELTA, "accountant": "monte_carlo"}
        drawn = planned_epsilon(sampler=strategy.under(sampler), **run)
        assert drawn < planned_epsilon(
            sampler=strategy.under(sampler), **{**run, "accountant": "pld"}
        )
        longer = matrix.BandedInverseToeplitz((1.0, -0.5), steps=100)
        with pytest.raises(ValueError, match="at most 4096 patterns of participation"):
            planned_epsilon(sampler=longer.under(sampler), **{**run, "steps": 100})
