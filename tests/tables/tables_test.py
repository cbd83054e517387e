"""Tests of tables with few trained rows: lookups, selection, its noise, price and size."""

import itertools
import math

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from scipy import stats

import dpoptax
from dpoptax import accounting, sampling, tables
from dpoptax.tables import count_rows
from tests.helpers import after_releases
from tests.oracles import fest as oracle

pytestmark = pytest.mark.usefixtures("no_room")

KEY = jax.random.key(0)
V, D, B, L = 50, 3, 12, 4
UNIT = 2**14


def loss_fn(params, example):
    lookups, target = example
    mean = jnp.mean(tables.look_up(params["table"], lookups), axis=0)
    return 0.5 * (mean @ params["weights"] + params["bias"] - target) ** 2


def some_params(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "table": rng.normal(size=(V, D)),
        "weights": rng.normal(size=D),
        "bias": np.asarray(0.3),
    }


def some_lookups(rng, batch=B):
    """Returns lookups with few frequent rows, repeated rows, and indices outside of the table."""
    lookups = np.minimum(rng.geometric(0.15, (batch, L)) - 1, V + 3)
    lookups[0], lookups[1], lookups[2, 1:] = -1, lookups[1, 0], V
    return lookups.astype(np.int32)


def as_arrays(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def counts_of(lookups, bound=2):
    return count_rows(np.asarray(lookups), V, bound, UNIT)


def test_counts_match_the_paper():
    lookups = some_lookups(np.random.default_rng(2), batch=40)
    expected = sum(oracle.contributions(row, V, 2) for row in lookups)
    np.testing.assert_allclose(counts_of(lookups) / UNIT, expected, atol=40 / UNIT)


@pytest.mark.parametrize("bound", [1, 2, 3, 7])
def test_example_moves_counts_by_at_most_their_bound(bound):
    rng = np.random.default_rng(bound)
    extremes = np.iinfo(np.int32)
    worst = 0
    candidates = [rng.choice(V, 10, replace=False), np.arange(10) % bound, [extremes.min] * 10]
    candidates += [np.r_[rng.choice(V, n), [-1, extremes.max, V] * 4][:10] for n in range(11)]
    for candidate in map(np.asarray, candidates):
        lookups = np.stack([candidate, *rng.integers(0, V, (7, 10))]).astype(np.int32)
        moved = counts_of(lookups, bound) - counts_of(lookups[1:], bound)
        worst = max(worst, int(moved @ moved))
    # Exact, because the weights are integers.
    assert 0.9999 * bound * UNIT**2 < worst <= bound * UNIT**2


def test_example_moves_sum_by_at_most_the_bound():
    """Checks repeated rows, rows outside of the table, huge and infinite numbers, and NaN."""
    rows = jnp.arange(0, V, 2)
    params = as_arrays(some_params())
    small = {**params, "table": tables.take_rows(params["table"], rows)}
    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(0.4)))
    points, rng, worst = dpoptax.gradient_points((), small), np.random.default_rng(0), 0.0
    strange = [[2, 2, 2, 2], [4, 3, -7, 2**31 - 1], [V, V, V, V], [0, 2, 4, 6]]
    for lookups, target in itertools.product(strange, [1e30, -3.0, np.inf, np.nan, 0.0]):
        others, targets = some_lookups(rng), rng.normal(size=B).astype(np.float32)
        others[-1], targets[-1] = lookups, target
        batch = tables.locate(others, rows, params["table"]), jnp.asarray(targets)
        both = [grad_fn(points, batch, jnp.arange(B) < size).sum for size in (B, B - 1)]
        moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, *both)
        worst = max(worst, math.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(moved))))
    assert 0.39 < worst < 0.4 * 1.0001


OPTIONS = {"table_size": V, "vocabulary_size": 5, "noise_multiplier": 2.0, "key": KEY}


@pytest.mark.parametrize("generator", ["threefry", "chacha20"])
def test_counts_have_noise_of_the_stated_size(generator):
    """The noise on 20,000 counts is normal with σ√m, which 3 % more or less is not."""
    size, lookups = 20_000, np.array([[3, 4, 5], [3, 3, -1]])
    key = dpoptax.random_key_from_os(generator) if generator == "chacha20" else KEY
    options = {**OPTIONS, "table_size": size, "key": key, "rows_per_example": 3}
    found = tables.select_rows(lookups, **options)
    expected = sum(oracle.contributions(row, size, 3) for row in lookups)
    z = (found.counts - expected) / (2.0 * math.sqrt(3))
    assert stats.kstest(z, "norm").pvalue > 1e-4
    off = [stats.chi2.cdf(np.sum((z * factor) ** 2), size) for factor in (0.97, 1.03)]
    assert off[0] < 1e-3
    assert off[1] > 1 - 1e-3


def test_masked_examples_do_not_count():
    lookups, mask = np.array([[1, 2], [3, 4]]), np.array([True, False])
    found = [tables.select_rows(x, y, **OPTIONS) for x, y in ((lookups, mask), (lookups[:1], None))]
    np.testing.assert_array_equal(found[0].counts, found[1].counts)


def test_vocabulary_contains_frequent_rows():
    rng = np.random.default_rng(0)
    lookups = np.minimum(rng.geometric(0.02, (3000, 2)) - 1, 9999)
    options = {**OPTIONS, "table_size": 10_000, "vocabulary_size": 100, "rows_per_example": 2}
    found = tables.select_rows(lookups, **{**options, "noise_multiplier": 5.0})
    assert found.rows.dtype == np.int32
    assert len(set(found.rows.tolist())) == 100
    assert (np.diff(found.rows) > 0).all()
    others = np.setdiff1d(np.arange(10_000), found.rows)
    assert found.counts[found.rows].min() >= found.counts[others].max()
    # Four standard deviations of the noise on a count.
    exact = count_rows(lookups, 10_000, 2, UNIT) / UNIT
    assert np.abs(found.counts - exact)[found.rows].max() < 4 * 5 * math.sqrt(2)


def test_vocabulary_is_priced_with_the_run():
    event = tables.select_rows(
        np.zeros((9, 1), int),
        table_size=9,
        vocabulary_size=3,
        noise_multiplier=5.0,
        key=jax.random.key(99),
    ).event
    sampler = sampling.PoissonSampler(dataset_size=3000, batch_size=30, seed=0)
    run = {"epsilon": 2.0, "delta": 1e-4, "steps": 5, "sampler": sampler, "accountant": "rdp"}
    sigma = accounting.calibrate(**run, also=[event])
    assert sigma > accounting.calibrate(**run)
    tx = dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=30, key=KEY)
    state = after_releases(tx, jnp.zeros(2), 5)
    spent = accounting.guarantee(state, sampler, accountant="rdp", also=[event]).epsilon(1e-4)
    assert 1.99 < spent <= 2.0
    assert spent > accounting.guarantee(state, sampler, accountant="rdp").epsilon(1e-4)
    step = dpa.PoissonSampledDpEvent(0.01, dpa.GaussianDpEvent(sigma))
    accountant = dpa.rdp.RdpAccountant()
    accountant.compose(dpa.SelfComposedDpEvent(step, 5)).compose(dpa.GaussianDpEvent(5.0))
    assert spent == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-3)
    with pytest.raises(TypeError, match="also"):
        accounting.guarantee(state, sampler, also=event).epsilon(1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"vocabulary_size": V + 1}, ValueError, "at most `table_size`"),
        ({"vocabulary_size": 0}, ValueError, "`vocabulary_size` must"),
        ({"table_size": 9.5}, ValueError, "`table_size` must be an integer"),
        ({"rows_per_example": 0}, ValueError, "`rows_per_example` must"),
        ({"noise_multiplier": 0.0}, ValueError, "`noise_multiplier` positive"),
        ({"lookups": np.zeros((9, 1))}, TypeError, "integers"),
        ({"mask": np.ones(8, bool)}, ValueError, "`mask` must have shape"),
        ({"key": 3}, TypeError, "not a seed"),
    ],
)
def test_refuses_bad_selections(changes, error, message):
    options = {"lookups": np.zeros((9, 1), int), **OPTIONS, **changes}
    with pytest.raises(error, match=message):
        tables.select_rows(**options)


def test_refuses_bad_lookups():
    with pytest.raises(ValueError, match="at least 1"):
        tables.locate(jnp.zeros(3, int), jnp.zeros(0, int))
    with pytest.raises(TypeError, match="integers"):
        tables.locate(jnp.zeros(3), jnp.zeros(1, int))


def large_arrays(jaxpr, size):
    """Returns the operations that create an array with at least this many entries."""
    for eqn in jaxpr.eqns:
        inside = list(jaxprs_in_params(eqn.params))
        large = any(math.prod(getattr(v.aval, "shape", ())) >= size for v in eqn.outvars)
        if large and (not inside or eqn.primitive.name.startswith("scatter")):
            yield eqn.primitive.name
        for program in inside:
            yield from large_arrays(program, size)


@pytest.mark.slow
def test_step_creates_no_array_of_table_size():
    size, rows = 200_000, jnp.arange(8)
    noise = dpoptax.gaussian_noise(noise_multiplier=0.5, batch_size=B, key=KEY)
    tx, grad_fn = optax.chain(noise, optax.adam(0.1)), dpoptax.clipped_grad(loss_fn, 1.0)
    table = jnp.zeros((size, D))
    params = {"table": table[:8], "weights": jnp.ones(D), "bias": jnp.zeros(())}

    def step(table, params, state, batch):
        located = tables.locate(batch[0], rows, table)
        points = dpoptax.gradient_points(state, params)
        updates, state = tx.update(grad_fn(points, (located, batch[1])), state, params)
        return optax.apply_updates(params, updates), state

    arguments = table, params, tx.init(params), (jnp.zeros((B, L), int), jnp.zeros(B))
    program = jax.make_jaxpr(step)(*arguments)
    assert not set(large_arrays(program.jaxpr, size))
    compiled = jax.jit(step).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * size


@pytest.mark.slow
def test_vocabulary_rows_have_gradient_of_whole_table():
    rng, params = np.random.default_rng(3), some_params()
    lookups, targets = some_lookups(rng), rng.normal(size=B)
    rows = np.unique(lookups[(lookups >= 0) & (lookups < V)])[1:]
    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1e6))
    arrays = as_arrays(params)
    small = {**arrays, "table": tables.take_rows(arrays["table"], rows)}
    located = tables.locate(lookups, jnp.asarray(rows), arrays["table"])
    found = jax.jit(grad_fn)(
        dpoptax.gradient_points((), small), (located, jnp.asarray(targets, jnp.float32))
    ).sum
    each = [oracle.gradient(params, i, t) for i, t in zip(lookups, targets, strict=True)]
    expected = {name: sum(one[name] for one in each) for name in params}
    expected["table"] = expected["table"][rows]
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
    whole = tables.put_rows(arrays["table"], rows, small["table"])
    np.testing.assert_array_equal(whole, arrays["table"])


def test_rows_outside_the_vocabulary_look_up_zeros():
    located = tables.locate(jnp.array([[3, 4], [-1, 3]]), jnp.array([3]))
    found = tables.look_up(jnp.ones((1, 2)), located)
    assert found.tolist() == [[[1, 1], [0, 0]], [[0, 0], [1, 1]]]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_indices_outside_the_table_look_up_zeros(dtype):
    table, info = jnp.ones((300, 2)), np.iinfo(dtype)
    lookups = np.array([0, info.max, info.min], dtype)
    expected = [0 <= int(j) < 300 for j in lookups]
    assert (tables.look_up(table, lookups)[:, 0] == 1).tolist() == expected
    assert count_rows(lookups[:, None], 300, 1, 1).sum() == sum(expected)
