"""Tests of prices for k records of one person against integrals, attacks and exact mechanisms."""

import math

import dp_accounting as dpa
import numpy as np
import pytest
from scipy import optimize, special, stats

from dpoptax import accounting, matrix, sampling
from dpoptax._pricing import accountants, several_records
from dpoptax._pricing.events import GroupDpEvent
from tests.helpers import event_epsilon

DELTA = 1e-5
ADD_OR_REMOVE = dpa.NeighboringRelation.ADD_OR_REMOVE_ONE


def person(records, *, sigma, q, steps):
    """Returns the guarantee for one person under Poisson sampling."""
    run = accounting.planned_guarantee(noise_multiplier=sigma, sampling_probability=q, steps=steps)
    return run.for_records(records)


def densities(x, records, sigma, q):
    """Returns the densities of a noisy sum with the person's records and without."""
    with_records = sum(
        stats.binom.pmf(j, records, q) * stats.norm.pdf(x, j, sigma) for j in range(records + 1)
    )
    return with_records, stats.norm.pdf(x, 0, sigma)


@pytest.mark.parametrize("records", [1, 2, 5])
@pytest.mark.parametrize(("sigma", "q"), [(0.6, 0.02), (2.0, 0.3)])
def test_one_step_is_the_integral(records, sigma, q):
    """In both directions, and the price is never below it."""
    x = np.linspace(-12 * sigma, records + 12 * sigma, 400_001)
    p, other = densities(x, records, sigma, q)
    found = person(records, sigma=sigma, q=q, steps=1)
    for epsilon in (0.1, 2.0):
        exact = max(
            np.maximum(a - math.exp(epsilon) * b, 0).sum() * (x[1] - x[0])
            for a, b in ((p, other), (other, p))
        )
        if exact > 1e-9:
            assert exact * (1 - 1e-7) <= found.delta(epsilon) <= exact * (1 + 1e-4)


@pytest.mark.parametrize(("records", "epsilon"), [(1, 3.0), (2, 6.451), (4, 14.30)])
def test_published_run(records, epsilon):
    found = person(records, sigma=0.8136, q=0.01, steps=1000).epsilon(DELTA)
    assert found == pytest.approx(epsilon, rel=1e-3)


def test_records_with_other_gradients_reveal_less():
    """Vectors of any directions and lengths of at most C, by integration on a plane."""
    rng, sigma, q, epsilon = np.random.default_rng(1), 0.7, 0.3, 0.8
    price = person(2, sigma=sigma, q=q, steps=1).delta(epsilon)
    axis = np.linspace(-6, 6, 601)
    grid = np.stack(np.meshgrid(axis, axis), -1)
    area = (axis[1] - axis[0]) ** 2

    def gaussian(mean):
        squares = ((grid - mean) ** 2).sum(-1)
        return np.exp(-squares / (2 * sigma**2)) / (2 * math.pi * sigma**2)

    closest = 0.0
    for angle in (0.0, 0.3, 1.5, 3.0):
        lengths = rng.uniform(0.5, 1.0, 2) if angle else np.ones(2)
        a = lengths[0] * np.array([1.0, 0.0])
        b = lengths[1] * np.array([math.cos(angle), math.sin(angle)])
        sums = [(1 - q) ** 2, 0 * a], [q * (1 - q), a], [q * (1 - q), b], [q * q, a + b]
        p = sum(weight * gaussian(mean) for weight, mean in sums)
        found = np.maximum(p - math.exp(epsilon) * gaussian(0 * a), 0).sum() * area
        assert found <= price * (1 + 1e-4)
        closest = max(closest, found / price)
    assert closest > 0.99


def test_one_record_has_the_price_of_the_run():
    run = accounting.planned_guarantee(
        noise_multiplier=0.9, sampler=sampling.PoissonSampler(1000, 20), steps=50
    )
    assert run.for_records(1).epsilon(DELTA) == run.epsilon(DELTA)
    mixture = several_records.SampledRecordsDpEvent(0.9, 0.02, 1)
    plain = dpa.PoissonSampledDpEvent(0.02, dpa.GaussianDpEvent(0.9))
    prices = [event_epsilon(dpa.SelfComposedDpEvent(each, 50), DELTA) for each in (mixture, plain)]
    assert prices[0] == pytest.approx(prices[1], rel=1e-5)


def test_full_batches_add_all_records():
    run = accounting.planned_guarantee(
        noise_multiplier=8.0, sampler=sampling.FixedSizeSampler(100, 100), steps=10
    )
    found = run.for_records(3).epsilon(DELTA)
    assert found == pytest.approx(event_epsilon(dpa.GaussianDpEvent(8 / 6 / 10**0.5), DELTA))


def test_truncated_batches_add_to_delta():
    """A batch with j of the records is truncated if more than b − j others are drawn."""
    records, size, b, q, steps = 3, 400, 27, 0.03, 40
    sampler = sampling.PoissonSampler(size, int(size * q), max_batch_size=b)
    run = accounting.planned_guarantee(noise_multiplier=1.0, sampler=sampler, steps=steps)
    delta = 0.002
    total = sum(
        stats.binom.pmf(j, records, q) * stats.binom.sf(b - j, size - records, q)
        for j in range(1, records + 1)
    )
    found = run.for_records(records).epsilon(delta)
    free = person(records, sigma=1.0, q=q, steps=steps)
    assert free.epsilon(delta - steps * total) < found < free.epsilon(delta - 1.2 * steps * total)


@pytest.mark.parametrize("records", [2, 5])
def test_group_privacy_of_a_gaussian_is_a_gaussian(records):
    """It is exact there, so a lower price would be false."""
    exact = event_epsilon(dpa.GaussianDpEvent(6.0 / records), DELTA)
    found = event_epsilon(GroupDpEvent(dpa.GaussianDpEvent(6.0), records), DELTA)
    assert exact <= found <= 1.01 * exact


@pytest.mark.parametrize(
    "sampler",
    [
        sampling.FixedSizeSampler(1000, 100),
        sampling.RandomAllocationSampler(1000, 100),
        sampling.GroupedPoissonSampler(1000, 48, group_sizes=(900, 100), weights=(1, 3)),
        matrix.CyclicPoissonSampler(1000, 50, cycle_length=4),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_other_samplers_are_priced_by_group_privacy(sampler):
    run = accounting.planned_guarantee(noise_multiplier=3.0, sampler=sampler, steps=10)
    found = run.for_records(2)
    assert isinstance(found.event.dp_event, GroupDpEvent)
    assert 2 * run.epsilon(DELTA) < found.epsilon(DELTA) < 3 * run.epsilon(DELTA)


def test_group_privacy_covers_other_events():
    vocabulary = dpa.PoissonSampledDpEvent(0.1, dpa.GaussianDpEvent(3.0))
    run = accounting.planned_guarantee(
        noise_multiplier=2.0, sampling_probability=0.01, steps=10, also=[vocabulary]
    )
    assert isinstance(run.for_records(2).event.dp_event, GroupDpEvent)


def test_poisson_price_is_below_group_privacy():
    run = accounting.planned_guarantee(
        noise_multiplier=0.8136, sampling_probability=0.01, steps=1000
    )
    group = event_epsilon(GroupDpEvent(run.event.dp_event, 2), DELTA)
    assert run.for_records(2).epsilon(DELTA) < 0.95 * group


def test_statement_names_the_records():
    found = person(3, sigma=2.0, q=0.01, steps=10)
    assert "for any 3 examples more or less" in str(found)
    assert found.to_dict()["records"] == 3
    plain = found.statement(owners="3")
    for part in ("any group of 3 examples, such", "wants to find groups of 3 examples", "most: 3."):
        assert part in plain
    assert 0 < found.trade_off(0.1) < 0.9
    curve = found.epsilon_curve([0, 5, 10], DELTA)
    assert curve[0] == 0 < curve[1] < curve[2] == found.epsilon(DELTA)
    assert found.gdp_mu(DELTA) > person(1, sigma=2.0, q=0.01, steps=10).gdp_mu(DELTA)


def test_refuses_bad_numbers_of_records():
    run = person(1, sigma=2.0, q=0.01, steps=10)
    for records in (0, -1, 1.5):
        with pytest.raises((ValueError, TypeError), match="records"):
            run.for_records(records)
    with pytest.raises(ValueError, match="for one record"):
        run.for_records(2).for_records(2)
    with pytest.raises(ValueError, match="no useful ε"):
        person(500, sigma=0.3, q=0.5, steps=1).epsilon(DELTA)


def test_losses_are_rounded_up():
    """Coarser grids give larger prices."""
    event = dpa.SelfComposedDpEvent(several_records.SampledRecordsDpEvent(1.0, 0.05, 3), 20)
    prices = [
        accountants.epsilon_of(event, DELTA, "pld", ADD_OR_REMOVE, interval)
        for interval in (1e-4, 1e-3, 1e-2, 5e-2)
    ]
    assert np.all(np.diff(prices) > 0)


def convolved(records, *, sigma, q, steps, spacing=2e-4):
    """Returns a lower bound on ε at DELTA: losses are rounded down."""
    x = np.linspace(-10 * sigma, records * min(1, 20 * q) + 9 * sigma, 400_001)
    weights = stats.binom.pmf(np.arange(records + 1), records, q)
    drawn = np.flatnonzero(weights > 1e-30)
    below = sum(weights[j] * stats.norm.cdf(x, j, sigma) for j in drawn)
    logs = [math.log(weights[j]) + j * (x - j / 2) / sigma**2 for j in drawn]
    loss = special.logsumexp(logs, axis=0)[:-1]  # at the left end of each cell
    places = np.floor(loss / spacing).astype(int)
    masses, first = np.bincount(places - places.min(), np.diff(below)), places.min()
    size = 1 << math.ceil(math.log2(4 * len(masses) + steps))
    total = np.fft.irfft(np.fft.rfft(masses, size) ** steps, size)
    losses = spacing * (steps * first + np.arange(size))

    def delta(epsilon):
        return np.sum(np.maximum(total, 0) * np.maximum(0, -np.expm1(epsilon - losses)))

    return optimize.brentq(lambda e: delta(e) - DELTA, 0, 50)


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "records", "right"),
    [(5e-4, 1.0, 20, 20, 0.5037), (1e-3, 1.0, 10, 100, 4.689), (1e-5, 1.0, 1, 100, 0.0)],
)
def test_improbable_draws_are_infinite_losses(q, sigma, steps, records, right):
    """Grids of all numbers of drawn records were refused, or took minutes."""
    found = person(records, sigma=sigma, q=q, steps=steps)
    stated = found.epsilon(DELTA)
    if right:
        lower = convolved(records, sigma=sigma, q=q, steps=steps)
        assert lower <= stated <= lower * 1.02
        assert stated == pytest.approx(right, rel=0.01)
    event = several_records.SampledRecordsDpEvent(sigma, q, records)
    pair = event.pair(ADD_OR_REMOVE, accountants.DISCRETIZATION)
    removed, added = pair._pmf_remove.to_dense_pmf(), pair._pmf_add.to_dense_pmf()
    assert max(removed.size, added.size) < 1_200_000  # what takes the time
    assert removed._infinity_mass < 1e-18


def test_group_privacy_of_a_stated_release_is_exact():
    """k records of (ε, δ) are (kε, δ (e^kε − 1)/(e^ε − 1))."""
    for k in (2, 3, 7):
        one = accounting.Guarantee(accounting.StatedDpEvent(0.3, 1e-8))
        exact = 1e-8 * math.expm1(0.3 * k) / math.expm1(0.3)
        assert exact <= one.for_records(k).delta(0.3 * k) <= 1.02 * exact
