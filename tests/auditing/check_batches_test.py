"""Tests that correct loaders raise no alarm, that faults of loaders are found, and of prices."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from dpoptax import accounting, auditing, sampling
from dpoptax.auditing._exact_scores import extremes_p_value, mean_p_value, spread_p_value
from dpoptax.matrix import CyclicPoissonSampler

N, B, STEPS = 2000, 64, 160
CLAIM = sampling.PoissonSampler(N, B)
LENGTHS = np.random.default_rng(1).integers(10, 500, N)

SAMPLERS = {
    "Poisson": sampling.PoissonSampler(400, 20, seed=0),
    "cut": sampling.PoissonSampler(400, 20, seed=0, max_batch_size=24, multiple_of=4),
    "full batch": sampling.PoissonSampler(40, 40, seed=0, max_batch_size=40, multiple_of=16),
    "grouped": sampling.GroupedPoissonSampler(
        400, 20, seed=0, group_sizes=(300, 100), weights=(1, 3)
    ),
    "fixed size": sampling.FixedSizeSampler(400, 20, seed=0),
    "shuffled": sampling.ShuffledSampler(410, 20, seed=0),
    "allocation": sampling.RandomAllocationSampler(400, 20, seed=0),
    "three of T": sampling.RandomAllocationSampler(400, 20, seed=0, participations=3),
    "cyclic": CyclicPoissonSampler(400, 20, seed=0, cycle_length=7),
    "cyclic in order": CyclicPoissonSampler(400, 57, seed=0, cycle_length=7, multiple_of=8),
}


def _check(sampler, seed, steps=60):
    sampler = dataclasses.replace(sampler, seed=seed)
    size = sampler.dataset_size
    return auditing.check_batches(sampler.samples(0, steps), dataset_size=size, claimed=sampler)


def _alarms(sampler, seeds):
    return sum(_check(sampler, seed).alarm for seed in seeds)


def test_correct_samplers_raise_no_alarm():
    """With a rate of 1 in 1,000, more than two alarms in 36 checks have a probability of 8e-6."""
    assert sum(_alarms(sampler, range(3)) for sampler in SAMPLERS.values()) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_p_values_of_correct_samplers_are_exact_or_conservative(name):
    seeds = 120
    reports = [_check(SAMPLERS[name], seed) for seed in range(seeds)]
    p_values = np.array([[test.p_value for test in report.tests] for report in reports])
    assert sum(report.alarm for report in reports) <= 2
    assert not any(report.impossible for report in reports)
    for level in (0.5, 0.1, 0.02):
        most = np.max(np.sum(p_values <= level, axis=0))
        assert stats.binom.sf(most - 1, seeds, level) > 1e-5


def test_p_values_of_small_counts_are_exact_or_conservative():
    """Small counts are mostly randomization, and all records are drawn before the last step."""
    rng = np.random.default_rng(0)
    claimed = sampling.PoissonSampler(20, 2)
    reports = [
        auditing.check_batches(
            [_poisson(rng, 20, 0.1) for _ in range(40)], dataset_size=20, claimed=claimed
        )
        for _ in range(80)
    ]
    p_values = np.array([[test.p_value for test in report.tests] for report in reports])
    for level in (0.5, 0.1, 0.02):
        most = np.max(np.sum(p_values <= level, axis=0))
        assert stats.binom.sf(most - 1, 80, level) > 1e-5


@pytest.mark.parametrize("p_value", [mean_p_value, spread_p_value, extremes_p_value])
def test_combined_p_values_are_valid(p_value):
    scores = np.random.default_rng(0).normal(size=(2000, 50))
    found = np.array([p_value(each) for each in scores])
    for level in (0.5, 0.1, 0.01):
        assert stats.binom.sf(np.sum(found <= level) - 1, 2000, level) > 1e-4
    assert p_value(np.zeros(0)) == 1.0


def _poisson(rng, size=N, rate=B / N):
    return np.flatnonzero(rng.random(size) < rate)


def _epochs(rng, number=5, order=None, drop_last=False):
    batches = []
    for _ in range(number):
        rows = rng.permutation(N) if order is None else order(rng)
        batches += [rows[i : i + B] for i in range(0, N, B)][: -1 if drop_last else None]
    return batches


def _same_seed_in_each_epoch(rng):
    return [_poisson(rng) for _ in range(N // B)] * 5


def _shards_of_hosts(rng):
    """Returns batches with an equal number of records from each of four hosts."""
    hosts = range(4)
    return [
        np.concatenate([4 * rng.permutation(N // 4)[: B // 4] + host for host in hosts])
        for _ in range(STEPS)
    ]


def _epochs_of_hosts(rng):
    """Returns epochs of two hosts, each with half of the rows in its own order."""
    batches = []
    for _ in range(5):
        first, second = (rng.permutation(N // 2) + host * N // 2 for host in range(2))
        batches += [
            np.concatenate([first[i : i + B // 2], second[i : i + B // 2]])
            for i in range(0, N // 2, B // 2)
        ]
    return batches


def _hosts_in_turns(rng):
    return [4 * _poisson(rng, N // 4, 4 * B / N) + step % 4 for step in range(STEPS)]


def _batches_by_length(rng):
    """Returns epochs whose megabatches are sorted by length, in random order."""

    def order(rng):
        parts = np.split(rng.permutation(N), 5)
        return np.concatenate([part[np.argsort(LENGTHS[part])] for part in parts])

    batches = _epochs(rng, order=order)
    return [batches[i] for i in rng.permutation(len(batches))]


def _sliding_window(rng):
    rows = rng.permutation(N)
    return [rows[(32 * step + np.arange(B)) % N] for step in range(STEPS)]


def _repeat(draw):
    return lambda rng: [draw(rng) for _ in range(STEPS)]


FAULTS = {
    "shuffled": (_epochs, "shuffled epochs"),
    "drop_last": (lambda rng: _epochs(rng, drop_last=True), "shuffled epochs with drop_last"),
    "fixed size": (
        _repeat(lambda rng: rng.choice(N, B, replace=False)),
        "batches of 64 without replacement",
    ),
    "one seed for all epochs": (_same_seed_in_each_epoch, "the same batches again"),
    "shards of hosts": (
        _shards_of_hosts,
        "batches of 16 without replacement on each of 4 hosts",
    ),
    "epochs of hosts": (_epochs_of_hosts, "shuffled epochs on each of 2 hosts"),
    "hosts in turns": (_hosts_in_turns, None),
    "in order": (
        lambda rng: [np.arange(i, i + B) % N for i in B * np.arange(STEPS)],
        None,
    ),
    "sorted by length": (_batches_by_length, "batches sorted by length"),
    "with replacement": (_repeat(lambda rng: rng.integers(0, N, B)), "batches with replacement"),
    "cut at 70": (
        _repeat(lambda rng: rng.permutation(_poisson(rng))[:70]),
        "Poisson samples cut to 70",
    ),
    "sliding window": (_sliding_window, None),
    "a group never drawn": (
        _repeat(lambda rng: _poisson(rng, N - 60)),
        None,
    ),
    "too large a rate": (
        _repeat(lambda rng: _poisson(rng, rate=1.1 * B / N)),
        "Poisson samples of {mean:.4g} on average",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("seed", range(5))
def test_finds_fault_of_loader(name, seed):
    make, closer = FAULTS[name]
    lengths = LENGTHS if "length" in name else None
    batches = make(np.random.default_rng(seed))
    closer = closer and closer.format(mean=np.mean([len(batch) for batch in batches]))
    report = auditing.check_batches(batches, dataset_size=N, claimed=CLAIM, lengths=lengths)
    assert report.impossible or report.findings[0].p_value < 1e-6
    assert report.alarm
    assert report.closer == closer or (closer and report.closer.startswith(closer))
    assert "NOT draws of it" in str(report)


OTHER_CLAIMS = {
    "fixed size, got Poisson": ("fixed size", "Poisson"),
    "shuffled, got fixed size": ("shuffled", "fixed size"),
    "allocation, got Poisson": ("allocation", "Poisson"),
    "cyclic, got Poisson": ("cyclic", "Poisson"),
    "grouped, got Poisson": ("grouped", "Poisson"),
    "cut, got Poisson": ("cut", "Poisson"),
    "three of T, got allocation": ("three of T", "allocation"),
}


@pytest.mark.parametrize("name", OTHER_CLAIMS)
def test_tells_samplers_from_each_other(name):
    claimed, drawn = (SAMPLERS[each] for each in OTHER_CLAIMS[name])
    report = auditing.check_batches(
        drawn.samples(0, 200), dataset_size=claimed.dataset_size, claimed=claimed
    )
    assert report.alarm


def test_finds_seed_of_two_runs():
    sampler = sampling.PoissonSampler(N, B, seed=3)
    other = sampling.PoissonSampler(N, B, seed=4)
    first, again, new = (list(each.samples(0, 40)) for each in (sampler, sampler, other))
    assert auditing.check_batches(first + again, dataset_size=N, claimed=CLAIM).alarm
    assert not auditing.check_batches(first + new, dataset_size=N, claimed=CLAIM).alarm


def test_batches_of_jax_privacy_raise_no_alarm():
    batch_selection = pytest.importorskip("jax_privacy.batch_selection")
    poisson = batch_selection.CyclicPoissonSampling(sampling_prob=B / N, iterations=STEPS)
    batches = poisson.batch_iterator(N, rng=0)
    assert not auditing.check_batches(batches, dataset_size=N, claimed=CLAIM).alarm


def test_price_of_shuffled_epochs_is_that_of_one_participation_in_each():
    terms = {"noise_multiplier": 1.0, "delta": 1e-5}
    batches = _epochs(np.random.default_rng(0))
    report = auditing.check_batches(batches, dataset_size=N, claimed=CLAIM, **terms)
    everyone = sampling.PoissonSampler(N, N)
    exact = accounting.planned_guarantee(sampler=everyone, steps=5, **terms).stated_epsilon
    assert report.participations == 5
    assert report.seen_guarantee.neighboring_relation == "replace-special"
    assert report.seen_guarantee.stated_epsilon == pytest.approx(exact, rel=1e-6)
    planned = accounting.planned_guarantee(sampler=CLAIM, steps=len(batches), **terms)
    assert report.claimed_guarantee.stated_epsilon == planned.stated_epsilon
    assert "without amplification" in str(report)


def test_price_of_more_steps_and_of_repeats():
    rows = [np.array([0, 0, 1]), np.array([0, 2, 3])]
    claimed = sampling.PoissonSampler(4, 2)
    terms = {"dataset_size": 4, "claimed": claimed, "noise_multiplier": 2.0, "delta": 1e-2}
    for steps, releases in ((2, 5), (1, 4), (3, 10)):
        report = auditing.check_batches(rows, steps=steps, **terms)
        assert report.seen_guarantee.releases[0].number == releases


def test_batches_that_depend_on_lengths_have_no_price():
    batches = _batches_by_length(np.random.default_rng(0))
    terms = {"noise_multiplier": 1.0, "delta": 1e-5, "lengths": LENGTHS}
    report = auditing.check_batches(batches, dataset_size=N, claimed=CLAIM, **terms)
    assert report.seen_guarantee is None


def test_shuffled_claim_has_only_the_price_without_amplification():
    batches = _epochs(np.random.default_rng(0))
    claimed = sampling.ShuffledSampler(N, B)
    report = auditing.check_batches(
        batches, dataset_size=N, claimed=claimed, noise_multiplier=1.0, delta=1e-5
    )
    assert not report.alarm
    assert report.claimed_guarantee is None
    assert report.seen_guarantee.releases[0].number == 5


@pytest.mark.parametrize(
    ("batches", "changes", "error", "match"),
    [
        ([], {}, ValueError, "at least one batch"),
        ([[0, N]], {}, ValueError, "rows from 0"),
        ([[0.5]], {}, TypeError, "row numbers"),
        ([[0]], {"dataset_size": N + 1}, ValueError, "dataset_size"),
        ([[0]], {"lengths": [1.0]}, ValueError, "lengths"),
        ([[0]], {"claimed": object()}, TypeError, "claimed"),
        (
            [[0]],
            {"claimed": sampling.RandomAllocationSampler(N, B, max_batch_size=100)},
            ValueError,
            "max_batch_size",
        ),
    ],
)
def test_rejects_wrong_arguments(batches, changes, error, match):
    with pytest.raises(error, match=match):
        auditing.check_batches(batches, **{"dataset_size": N, "claimed": CLAIM, **changes})
