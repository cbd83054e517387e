"""Tests of samplers: distribution of draws, privacy events, and errors."""

import dataclasses
import json
import pickle
import tracemalloc

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import dpoptax
from dpoptax.matrix import CyclicPoissonSampler
from dpoptax.sampling import (
    FixedSizeSampler,
    GroupedPoissonSampler,
    PoissonSampler,
    RandomAllocationSampler,
    Sample,
    ShuffledSampler,
    _base,
    _draws,
)
from tests.helpers import covering, slow_but

KINDS = [
    PoissonSampler,
    FixedSizeSampler,
    ShuffledSampler,
    RandomAllocationSampler,
]
# A correct sampler fails at this level for one seed in a thousand, and the seeds are fixed. A wrong
# sampler must fall below REJECT.
ACCEPT, REJECT = 1e-3, 1e-6


def draws(sampler, steps):
    return [sample.indices[sample.mask] for sample in sampler.samples(0, steps)]


def membership(drawn, dataset_size):
    """Returns a (steps, dataset_size) 0/1 matrix."""
    matrix = np.zeros((len(drawn), dataset_size))
    for row, indices in zip(matrix, drawn, strict=True):
        np.add.at(row, indices, 1)
    return matrix


def p_uniform_inclusion(drawn, dataset_size):
    """Returns the p-value that each record is drawn equally often."""
    return stats.chisquare(membership(drawn, dataset_size).sum(axis=0)).pvalue


def p_independent_pairs(drawn, dataset_size, probability):
    """Returns the p-value that pairs of records share steps as often as independent ones."""
    x = membership(drawn, dataset_size)
    together = (x.T @ x)[np.triu_indices(dataset_size, 1)]
    expected = len(x) * probability**2
    # The counts of pairs that share a record are correlated only through its own count.
    z = (together.mean() - expected) / np.std(
        np.sum(x, axis=1) * (np.sum(x, axis=1) - 1) / len(together) / 2, ddof=1
    )
    return 2 * stats.norm.sf(abs(z) / np.sqrt(len(x)))


def p_independent_steps(drawn, dataset_size, probability):
    """Returns the p-value of how often a record is in two consecutive steps."""
    x = membership(drawn, dataset_size)
    repeats = int((x[1:] * x[:-1]).sum())
    return stats.binomtest(repeats, x[1:].size, probability**2).pvalue


def p_binomial_count(drawn, dataset_size, probability):
    counts = np.array([len(d) for d in drawn])
    edges = np.unique(stats.binom.ppf(np.linspace(0, 1, 9)[1:-1], dataset_size, probability))
    edges = np.concatenate([[-1], edges, [dataset_size]])
    observed = np.histogram(counts, edges + 0.5)[0]
    expected = len(counts) * np.diff(stats.binom.cdf(edges, dataset_size, probability))
    return stats.chisquare(observed, expected).pvalue


def bernoulli_draws(steps, size, probability, rng):
    return [np.flatnonzero(rng.random(size) < probability) for _ in range(steps)]


N, Q, STEPS = 40, 0.25, 4000
SEEDS = (1, bytes(range(32)))  # of PCG64 and of SHAKE-256


@pytest.mark.parametrize("seed", SEEDS, ids=["PCG64", "SHAKE-256"])
def test_poisson_draws_are_independent_coins(seed):
    drawn = draws(PoissonSampler(N, 10, seed=seed), STEPS)
    assert p_uniform_inclusion(drawn, N) > ACCEPT
    assert p_independent_pairs(drawn, N, Q) > ACCEPT
    assert p_independent_steps(drawn, N, Q) > ACCEPT
    assert p_binomial_count(drawn, N, Q) > ACCEPT


def test_poisson_checks_reject_wrong_samplers():
    rng = np.random.default_rng(3)
    fixed = draws(FixedSizeSampler(N, 10, seed=1), STEPS)
    assert p_binomial_count(fixed, N, Q) < REJECT

    coins = bernoulli_draws(STEPS, N, Q, rng)
    biased = [d[(d > 0) | (rng.random(len(d)) < 0.7)] for d in coins]
    assert p_uniform_inclusion(biased, N) < REJECT

    larger = bernoulli_draws(STEPS, N, 0.27, rng)
    assert p_binomial_count(larger, N, Q) < REJECT

    overdispersed = [
        np.flatnonzero(rng.random(N) < q) for q in rng.choice([Q - 0.1, Q + 0.1], STEPS)
    ]
    assert p_independent_pairs(overdispersed, N, Q) < REJECT

    repeated = [coins[t - t % 2] for t in range(STEPS)]
    assert p_independent_steps(repeated, N, Q) < REJECT

    shuffled = draws(ShuffledSampler(N, 10, seed=1), STEPS)
    assert p_independent_steps(shuffled, N, Q) < REJECT


@pytest.mark.parametrize("seed", SEEDS, ids=["PCG64", "SHAKE-256"])
def test_truncated_draws_keep_a_uniform_subset(seed):
    sampler = PoissonSampler(N, 10, seed=seed, max_batch_size=12)
    drawn = draws(sampler, STEPS)
    counts = np.array([len(d) for d in drawn])
    pmf = stats.binom.pmf(np.arange(N + 1), N, Q)
    expected = np.append(pmf[5:12], pmf[12:].sum())
    observed = np.array([(counts == k).sum() for k in range(5, 13)])
    expected = np.insert(expected, 0, pmf[:5].sum()) * STEPS
    observed = np.insert(observed, 0, (counts < 5).sum())
    assert stats.chisquare(observed, expected).pvalue > ACCEPT
    assert p_uniform_inclusion(drawn, N) > ACCEPT
    full = [d for d in drawn if len(d) == 12]
    assert p_uniform_inclusion(full, N) > ACCEPT


@pytest.mark.parametrize(("size", "seed"), [(2, 5), (12, 5), (40, 5), (12, SEEDS[1])], ids=str)
def test_fixed_size_subsets_are_uniform(size, seed):
    drawn = draws(FixedSizeSampler(N, size, seed=seed), STEPS)
    assert {len(np.unique(d)) for d in drawn} == {size}
    assert p_uniform_inclusion(drawn, N) > ACCEPT
    pairs = membership(drawn, N)
    together = (pairs.T @ pairs)[np.triu_indices(N, 1)]
    if size < N:
        # Negatively correlated cells: the chi-square test on pair counts is conservative.
        assert stats.chisquare(together).pvalue > ACCEPT
    assert p_independent_steps(drawn, N, size / N) > ACCEPT


@pytest.mark.parametrize(("size", "batch"), [(1, 1), (2, 1), (10, 3), (97, 8), (1000, 1000)])
@pytest.mark.parametrize("seed", SEEDS, ids=["PCG64", "SHAKE-256"])
def test_shuffled_epochs_hold_each_record_once(size, batch, seed):
    sampler = ShuffledSampler(size, batch, seed=seed)
    for epoch in range(3):
        start = epoch * sampler.steps_per_epoch
        seen = np.concatenate(
            [s.indices[s.mask] for s in sampler.samples(start, start + sampler.steps_per_epoch)]
        )
        assert sorted(seen) == list(range(size))


@pytest.mark.parametrize("size", slow_but((2, 3), [2, 3, 4, 5]))
def test_shuffled_orders_are_uniform(size):
    sampler = ShuffledSampler(size, 1, seed=7)
    epochs = 1200
    flat = np.array([d[0] for d in draws(sampler, size * epochs)]).reshape(epochs, size)
    codes = flat @ size ** np.arange(size)
    _, counts = np.unique(codes, return_counts=True)
    assert len(counts) == np.prod(np.arange(1, size + 1))
    assert stats.chisquare(counts).pvalue > ACCEPT


@pytest.mark.parametrize("kind", KINDS)
def test_draws_depend_only_on_seed_and_step(kind):
    sampler = kind(1000, 50, seed=9)
    forwards = [sampler.sample(t) for t in range(30)]
    restored = pickle.loads(pickle.dumps(sampler))
    assert restored == sampler
    assert hash(restored) == hash(sampler)
    for t in reversed(range(30)):
        for one, other in zip(restored.sample(t), forwards[t], strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(kind(1000, 50, seed=10).sample(0).indices, forwards[0].indices)
    assert len({tuple(s.indices) for s in forwards}) == 30
    # (seed, step) pairs with the same digits give different draws.
    assert not np.array_equal(
        kind(1000, 50, seed=1).sample(23).indices, kind(1000, 50, seed=12).sample(3).indices
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("multiple_of", [1, 16])
def test_samples_have_one_static_shape(kind, multiple_of):
    sampler = kind(1001, 50, seed=11, multiple_of=multiple_of)
    assert sampler.padded_size % multiple_of == 0
    for sample in sampler.samples(0, 50):
        assert isinstance(sample, Sample)
        assert sample.indices.shape == sample.mask.shape == (sampler.padded_size,)
        assert sample.indices.dtype == np.int64
        assert sample.mask.dtype == bool
        assert np.all((sample.indices >= 0) & (sample.indices < 1001))
        assert len(set(sample.indices[sample.mask])) == sample.mask.sum()
        assert np.all(sample.indices[~sample.mask] == 0)


@pytest.mark.parametrize(
    "sampler",
    [
        PoissonSampler(6, 4, seed=0),
        FixedSizeSampler(6, 4, seed=0),
        CyclicPoissonSampler(12, 4, seed=0, cycle_length=2),
        RandomAllocationSampler(12, 4, seed=0),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_records_of_a_draw_have_random_positions(sampler):
    """An added record takes a padded or an occupied position, and moves at most one record."""
    size, padding = sampler.padded_size, sampler.dataset_size
    counts = np.zeros((padding + 1, size))
    for indices, mask in sampler.samples(0, 100):
        counts[np.where(mask, indices, padding), np.arange(size)] += 1
    counts = counts[counts.any(axis=1)]
    expected = counts.sum(axis=1, keepdims=True) / size
    degrees = len(counts) * (size - 1)
    assert stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), df=degrees) > ACCEPT


@pytest.mark.parametrize("kind", [PoissonSampler, FixedSizeSampler])
def test_memory_is_proportional_to_batch(kind):
    sampler = kind(10**8, 256, seed=12)
    sampler.sample(0)
    tracemalloc.start()
    sampler.sample(1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_full_batches():
    for kind in KINDS:
        sampler = kind(20, 20, seed=13)
        assert sampler.sampling_probability == 1
        assert sorted(sampler.sample(3).indices) == list(range(20))
        assert sampler.sample(3).mask.all()


def test_default_padding():
    sampler = PoissonSampler(50_000, 256, seed=0, multiple_of=64)
    assert sampler.padded_size == 384
    assert sampler.overflow_probability < 1e-12
    assert PoissonSampler(30, 20, seed=0).padded_size == 30
    assert (
        PoissonSampler(50_000, 256, seed=0, multiple_of=64, max_batch_size=300).padded_size == 320
    )


@pytest.mark.parametrize(
    ("kind", "multiple_of"),
    covering(
        {kind.__name__: kind for kind in (PoissonSampler, RandomAllocationSampler)},
        [1, 4],
        strength=1,
    ),
)
def test_padded_size_differs_from_a_full_batch(kind, multiple_of):
    """The noise stage detects a missing mask by the number of rows."""
    sampler = kind(60, 8, seed=0, multiple_of=multiple_of, max_batch_size=8)
    sizes = {int(sampler.sample(t).mask.sum()) for t in range(40)}
    assert max(sizes) == 8
    assert len(sizes) > 1
    assert sampler.padded_size == 8 + multiple_of
    expected = stats.binom.sf(8, 60, sampler.sampling_probability)
    assert sampler.overflow_probability == pytest.approx(expected)
    grad_fn = dpoptax.clipped_grad(lambda w, x: w @ x, dpoptax.l2_clip(1.0), method="vmap")
    tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=8, key=jax.random.key(0))
    points, state = dpoptax.gradient_points((), jnp.zeros(60)), tx.init(jnp.zeros(60))
    draw = sampler.sample(0)
    batch = jnp.eye(60)[draw.indices]
    step = lambda *mask: tx.update(grad_fn(points, batch, *mask), state)  # noqa: E731
    jax.eval_shape(step, draw.mask)
    with pytest.raises(ValueError, match="Without a mask"):
        jax.eval_shape(step)


def test_poisson_event_matches_draws():
    gaussian = dpa.GaussianDpEvent(1.5)
    assert PoissonSampler(50_000, 256, seed=0).dp_event(1.5, 7) == dpa.SelfComposedDpEvent(
        dpa.TruncatedSubsampledGaussianDpEvent(
            50_000, 256 / 50_000, PoissonSampler(50_000, 256, seed=0).padded_size, 1.5
        ),
        7,
    )
    # If every record fits, a batch is never truncated.
    assert PoissonSampler(30, 20, seed=0).dp_event(1.5, 7) == dpa.SelfComposedDpEvent(
        dpa.PoissonSampledDpEvent(20 / 30, gaussian), 7
    )
    assert PoissonSampler(30, 30, seed=0).dp_event(1.5, 7) == dpa.SelfComposedDpEvent(gaussian, 7)
    assert PoissonSampler(30, 20, seed=0).neighboring_relation == "add-or-remove-one"


def test_fixed_size_event():
    sampler = FixedSizeSampler(30, 20, seed=0)
    assert sampler.dp_event(1.5, 7) == dpa.SelfComposedDpEvent(
        dpa.SampledWithoutReplacementDpEvent(30, 20, dpa.GaussianDpEvent(1.5)), 7
    )
    assert sampler.neighboring_relation == "replace-one"


@pytest.mark.parametrize("kind", [PoissonSampler, FixedSizeSampler])
def test_events_at_the_edges(kind):
    sampler = kind(30, 20, seed=0)
    assert sampler.dp_event(1.0, 0) == dpa.NoOpDpEvent()
    assert sampler.dp_event(float("inf"), 5) == dpa.NoOpDpEvent()
    assert sampler.dp_event(0.0, 5) == dpa.NonPrivateDpEvent()


def test_shuffled_has_no_event():
    with pytest.raises(ValueError, match="no privacy event.*PoissonSampler"):
        ShuffledSampler(30, 20, seed=0).dp_event(1.0, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_describe_is_json_without_the_seed(kind):
    sampler = kind(np.int64(300), np.int32(20), seed=987654321)
    text = json.dumps(sampler.describe())
    assert "987654321" not in text
    described = json.loads(text)
    assert described["sampling"] == kind.__name__
    assert described["sampling_probability"] == 20 / 300
    assert described["neighboring_relation"] == sampler.neighboring_relation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be .* got 0. .*Choose"),
        ({"batch_size": -3}, "`batch_size` must be .* got -3. .*Choose"),
        ({"batch_size": 2.5}, "`batch_size` must be an integer .* got 2.5"),
        ({"batch_size": float("nan")}, "`batch_size` must be an integer .* got nan"),
        ({"batch_size": 31}, "`batch_size` must be at most `dataset_size`, 30, got 31"),
        ({"dataset_size": 0}, "`dataset_size` must be .* got 0. .*Count"),
        ({"seed": -123}, "`seed` must be a non-negative integer. .*not shown. .*secrets"),
        ({"seed": 1.5}, "`seed` must be a non-negative integer"),
        ({"seed": True}, "`seed` must be a non-negative integer"),
        ({"multiple_of": 0}, "`multiple_of` must be .* got 0. .*microbatch"),
    ],
)
def test_refuses_bad_input(kind, arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        kind(**{"dataset_size": 30, "batch_size": 20, "seed": 0, **arguments})
    assert "-123" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_sampler_without_a_seed_is_priced_but_cannot_draw(kind):
    sampler = kind(dataset_size=30, batch_size=10)
    assert sampler == dataclasses.replace(kind(30, 10, seed=0), seed=None)
    with pytest.raises(ValueError, match="must have a seed to draw, got None"):
        sampler.sample(0)
    if kind is not ShuffledSampler:
        assert sampler.dp_event(1.0, 2) == kind(30, 10, seed=0).dp_event(1.0, 2)


@pytest.mark.parametrize("size", [19, 31, 0])
def test_bad_max_batch_size(size):
    with pytest.raises(ValueError, match=f"`max_batch_size` must be .* got {size}\\."):
        PoissonSampler(30, 20, seed=0, max_batch_size=size)


def test_batch_of_cyclic_sampler_fits_into_a_group():
    assert CyclicPoissonSampler(30, 10, seed=0, cycle_length=3).participation_probability == 1
    with pytest.raises(ValueError, match="at most the 10 records of a group, got 11"):
        CyclicPoissonSampler(30, 11, seed=0, cycle_length=3)


def test_negative_step():
    for kind in KINDS:
        with pytest.raises(ValueError, match="`step` must be an integer of at least 0, got -1"):
            kind(30, 20, seed=0).sample(-1)


@pytest.mark.parametrize("kind", [PoissonSampler, ShuffledSampler])
def test_messages_do_not_contain_the_seed(kind):
    sampler = kind(dataset_size=100, batch_size=10, seed=271828)
    assert "271828" not in repr(sampler)
    if kind is ShuffledSampler:
        with pytest.raises(ValueError, match="no") as caught:
            sampler.dp_event(1.0, 1)
        assert "271828" not in str(caught.value)


@pytest.mark.parametrize("size", [1, 3, 100, 1438, 60_000, 1_281_167, 10**7])
def test_largest_draws_match_scipy_quantiles(size):
    drawn = {1, 2, size // 1000, size // 20, size // 2, size - 1, size, min(size, 256)}
    for probability in [0.0, *(count / size for count in drawn if 0 < count <= size)]:
        usual = stats.binom.isf(1e-12, size, probability)
        assert _draws.largest_draw(size, probability) == usual
        rare = _draws.largest_draw(size, probability, _draws.RARE_OVERFLOW_PROBABILITY)
        assert stats.binom.sf(rare, size, probability) <= 1e-18
        if rare > size * probability + 1:
            assert stats.binom.sf(rare - 1, size, probability) > 1e-18


def test_refuses_draw_inside_jit():
    sampler = PoissonSampler(dataset_size=100, batch_size=10, seed=0)
    with pytest.raises(ValueError, match=r"drawn outside of jit, ahead of a scan by samples"):
        jax.jit(sampler.sample)(0)


@pytest.mark.parametrize("kind", [*KINDS, GroupedPoissonSampler, CyclicPoissonSampler])
@pytest.mark.parametrize("name", _base._DRAWING)
def test_refuses_classes_that_draw_in_their_own_way_without_an_event(kind, name):
    changed = {name: lambda self, step: kind.sample(self, 0)}
    message = f"`Other` must define `dp_event`, because it overrides `{name}` .* `{kind.__name__}`"
    with pytest.raises(TypeError, match=message):
        type("Other", (kind,), changed)
    mixin = type("Mixin", (), changed)
    with pytest.raises(TypeError, match="must define"):
        type("Other", (mixin, kind), {})
    stated = {"dp_event": kind.dp_event}
    other = type("Other", (kind,), changed | stated)
    assert issubclass(type("Later", (other,), {}), kind)  # a subclass of it draws as it states


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_the_only_positional_arguments(kind):
    kind(8, 4)
    with pytest.raises(TypeError, match="positional argument"):
        kind(8, 4, 0)


def test_subclass_with_its_own_event_has_no_price_with_correlated_noise():
    """Correlated noise is priced by the turns of a cyclic sampler, or by its periods."""

    class InOneStep(RandomAllocationSampler):
        def dp_event(self, noise_multiplier, steps):
            return PoissonSampler(4, 4, seed=0).dp_event(noise_multiplier, steps)

    class InOneGroup(CyclicPoissonSampler):
        def sample(self, step):
            return super().sample(0)

        def dp_event(self, noise_multiplier, steps):
            return PoissonSampler(4, 4, seed=0).dp_event(noise_multiplier, steps)

    class Logged(CyclicPoissonSampler):
        dp_event = CyclicPoissonSampler.dp_event

        def sample(self, step):
            return super().sample(step)

    strategy = dpoptax.matrix.BandedToeplitz((0.8, 0.6))
    assert strategy.under(Logged(12, 3, seed=0, cycle_length=4)).sensitivity(4) == pytest.approx(1)
    with pytest.raises(ValueError, match="`sampler` must be a CyclicPoissonSampler"):
        strategy.under(InOneGroup(12, 3, seed=0, cycle_length=4))
    with pytest.raises(ValueError, match="`sampler` must be a CyclicPoissonSampler or a Random"):
        strategy.under(InOneStep(12, 1, seed=0))
