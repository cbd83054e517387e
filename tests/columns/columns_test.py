"""Tests of counts of columns: their sensitivity, noise, price and statistics."""

import math

import dp_accounting as dpa
import jax
import numpy as np
import pytest
from scipy import stats

import dpoptax
from dpoptax import accounting, columns, sampling, users

KEY = jax.random.key(0)
LITTLE = 1e-4  # a noise multiplier far below one example
EDGES = np.linspace(-2.0, 2.0, 9)
BINS = {"x": EDGES, "word": ("a", "b", "c")}


def drawn_columns(rng, rows):
    """Returns columns with missing values, values beyond the edges and unknown words."""
    x = rng.normal(size=rows)
    x[rng.random(rows) < 0.1] = np.nan
    x[rng.random(rows) < 0.05] = np.inf
    return {"x": x, "word": rng.choice(["a", "b", "c", "d"], rows), "unused": x}


def totals(monkeypatch, table, bins=BINS, **options):
    """Returns the integers before the noise as one vector, and the integer of one example."""
    seen = {}

    def trusted(total, clip, *, grid, examples):
        seen.update(total=total, grid=grid)
        return dpoptax.extend.trust_clipped(total, clip, grid=grid, examples=examples)

    with monkeypatch.context() as patch:
        patch.setattr(columns, "trust_clipped", trusted)
        columns.release_counts(table, bins, noise_multiplier=1.0, key=KEY, **options)
    return np.concatenate([np.asarray(seen["total"][n], np.int64) for n in bins]), 1 / seen["grid"]


def without(table, rows):
    return {name: np.delete(np.asarray(column), rows) for name, column in table.items()}


def test_counts_equal_histograms():
    table = drawn_columns(np.random.default_rng(0), 500)
    found = columns.release_counts(table, BINS, noise_multiplier=LITTLE, key=KEY).counts
    x = table["x"]
    clipped = np.clip(x[~np.isnan(x)], -2, 2)
    np.testing.assert_allclose(found["x"][:-1], np.histogram(clipped, EDGES)[0], atol=0.01)
    assert found["x"][-1] == pytest.approx(np.isnan(x).sum(), abs=0.01)
    words = [np.sum(table["word"] == word) for word in "abcd"]
    np.testing.assert_allclose(found["word"], words, atol=0.01)
    assert list(found) == list(BINS)


def test_an_example_changes_the_sums_by_one_in_each_column(monkeypatch):
    table = drawn_columns(np.random.default_rng(1), 300)
    all_rows, unit = totals(monkeypatch, table)
    for row in range(0, 300, 60):
        change = (all_rows - totals(monkeypatch, without(table, [row]))[0]) / unit
        assert sorted(change)[-2:] == [1, 1]
        assert np.linalg.norm(change) == math.sqrt(2)


@pytest.mark.parametrize("rows_of_user", [1, 3, 7, 1000])
def test_a_user_changes_the_sums_by_at_most_the_bound(monkeypatch, rows_of_user):
    rng = np.random.default_rng(rows_of_user)
    table = drawn_columns(rng, 200 + rows_of_user)
    if rows_of_user == 1000:  # all in one bin, which is the longest change
        table = {n: np.append(c[:200], np.repeat(c[0], 1000)) for n, c in table.items()}
    owners = rng.permutation(np.append(np.arange(200) % 90, np.full(rows_of_user, 90)))

    def sums(table, owners):
        users_of = users.UserTable(owners, records_per_user=1, seed=0)
        return totals(monkeypatch, table, users=users_of)

    all_rows, unit = sums(table, owners)
    mine = np.flatnonzero(owners == 90)
    change = all_rows - sums(without(table, mine), np.delete(owners, mine))[0]
    assert np.all(change >= 0)
    assert (change[: len(EDGES)].sum(), change[len(EDGES) :].sum()) == (unit, unit)
    assert np.linalg.norm(change) <= math.sqrt(2) * unit


def test_users_count_once():
    owners = ["ada"] * 3 + ["bob"]
    table = {"x": [0.5, 0.5, 1.5, 1.5]}
    owned = users.UserTable(owners, records_per_user=1, seed=0)
    found = columns.release_counts(
        table, {"x": [0, 1, 2]}, noise_multiplier=LITTLE, key=KEY, users=owned
    )
    np.testing.assert_allclose(found.counts["x"], [2 / 3, 4 / 3, 0], atol=0.01)


@pytest.mark.parametrize("number", [1, 4])
def test_noise_has_the_stated_deviation(number):
    """The noise grows with the number of columns."""
    bins = {f"x{i}": np.arange(5001.0) for i in range(number)}
    table = {name: np.full(100, 7000.0) for name in bins}
    found = columns.release_counts(table, bins, noise_multiplier=3.0, key=KEY)
    assert found.stddev == 3.0 * math.sqrt(number)
    noise = np.concatenate([counts[:-2] for counts in found.counts.values()])
    assert len(np.unique(noise)) > 0.9 * len(noise)
    expected = stats.norm(scale=found.stddev)
    assert stats.kstest(noise, expected.cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(noise * wrong, expected.cdf).pvalue < 1e-6


def test_noise_depends_on_the_key_only():
    table = drawn_columns(np.random.default_rng(0), 400)
    first, other = (
        columns.release_counts(table, BINS, noise_multiplier=1.0, key=jax.random.key(seed))
        for seed in (0, 1)
    )
    again = columns.release_counts(table, BINS, noise_multiplier=1.0, key=KEY)
    np.testing.assert_array_equal(first.counts["x"], again.counts["x"])
    assert np.all(first.counts["x"] != other.counts["x"])


def test_price_is_that_of_one_gaussian_release():
    table = drawn_columns(np.random.default_rng(0), 400)
    found = columns.release_counts(table, BINS, noise_multiplier=4.0, key=KEY)
    alone = accounting.Guarantee(found.event, stated_delta=1e-6)
    accountant = dpa.pld.PLDAccountant().compose(dpa.GaussianDpEvent(4.0))
    assert alone.stated_epsilon == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-3)
    sizes = {"dataset_size": 400, "batch_size": 40, "steps": 10}
    plan = dpoptax.PrivacyPlan(**sizes, epsilon=2.0, delta=1e-5, also=[found.event])
    assert plan.epsilon <= 2.0
    assert (
        plan.noise_multiplier
        > dpoptax.PrivacyPlan(**sizes, epsilon=2.0, delta=1e-5).noise_multiplier
    )
    with pytest.raises(ValueError, match="same noise key"):
        plan.new_run(KEY)


def test_price_of_users_does_not_mix_with_examples():
    owned = users.UserTable(np.arange(400) // 4, records_per_user=2, seed=0)
    table = drawn_columns(np.random.default_rng(0), 400)
    found = columns.release_counts(table, BINS, noise_multiplier=4.0, key=KEY, users=owned)
    alone = accounting.Guarantee(found.event)
    assert "for one user with all of its records" in str(alone)
    sizes = {"steps": 10, "noise_multiplier": 1.0, "also": [found.event]}
    drawn = owned.sampler(sampling.PoissonSampler, batch_size=10)
    assert dpoptax.PrivacyPlan(sampler=drawn, **sizes).guarantee().unit == "user"
    with pytest.raises(ValueError, match="must have the same unit"):
        dpoptax.PrivacyPlan(dataset_size=400, batch_size=10, **sizes)
    others = users.UserTable(np.arange(400) // 2, records_per_user=2, seed=0)
    drawn = others.sampler(sampling.PoissonSampler, batch_size=10)
    with pytest.raises(ValueError, match="must have the same users"):
        dpoptax.PrivacyPlan(sampler=drawn, **sizes)


def test_statistics_are_close_to_those_of_the_values():
    rng = np.random.default_rng(0)
    x = rng.gamma(3.0, size=20_000)
    table = {"x": np.append(x, np.full(500, np.nan))}
    found = columns.release_counts(
        table, {"x": np.linspace(0, 20, 101)}, noise_multiplier=5.0, key=KEY
    )
    mean, scale = found.mean_and_scale("x")
    assert mean == pytest.approx(x.mean(), abs=0.1)
    assert scale == pytest.approx(x.std(), abs=0.2)
    levels = [0.0, 0.1, 0.5, 0.9]
    np.testing.assert_allclose(
        found.quantiles("x", levels)[1:], np.quantile(x, levels[1:]), atol=0.1
    )


def test_statistics_are_finite_without_values():
    table = {"x": np.full(3, np.nan)}
    for seed in range(4):
        found = columns.release_counts(
            table, {"x": [0, 1, 2]}, noise_multiplier=9.0, key=jax.random.key(seed)
        )
        mean, scale = found.mean_and_scale("x")
        assert 0 <= mean <= 2
        assert scale > 0
        assert np.all(np.isfinite(found.quantiles("x", [0, 0.5, 1])))


@pytest.mark.parametrize(
    ("bins", "options", "message"),
    [
        ({}, {}, "`bins` must have a column"),
        ({"x": [1.0]}, {}, "two or more and increase"),
        ({"x": [1.0, 1.0]}, {}, "two or more and increase"),
        ({"x": [0.0, np.nan]}, {}, "increase"),
        ({"x": [0.0, np.inf]}, {}, "finite"),
        ({"word": ["a", "a"]}, {}, "must differ"),
        ({"x": [0, 1], "short": [0, 1]}, {}, r"'short' must have shape \(4,\)"),
        ({"x": [0, 1]}, {"noise_multiplier": 0.0}, "`noise_multiplier` must be positive"),
        ({"x": [0, 1]}, {"noise_multiplier": 1e6}, "must be smaller"),
        ({"word": [0, 1]}, {}, "'word' must hold numbers, because its bins are edges"),
        ({"x": ["0", "1"]}, {}, "'x' must hold text, because its bins are words"),
    ],
)
def test_refuses_wrong_arguments(bins, options, message):
    table = {"x": np.zeros(4), "word": ["a"] * 4, "short": np.zeros(3)}
    with pytest.raises(ValueError, match=message):
        columns.release_counts(table, bins, **{"noise_multiplier": 1.0, "key": KEY, **options})
    found = columns.release_counts(table, {"word": ["a"]}, noise_multiplier=1.0, key=KEY)
    with pytest.raises(ValueError, match="must be a column with edges"):
        found.mean_and_scale("word")
    with pytest.raises(KeyError, match="must have the column 'wort' of `bins`, got .'x', 'word'"):
        columns.release_counts(table, {"wort": ["a"]}, noise_multiplier=1.0, key=KEY)
