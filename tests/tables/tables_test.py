"""Tests of tables with few trained rows: sum, selection, its law, price and size."""

import dataclasses
import itertools
import math
import traceback

import dp_accounting as dpa
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import jaxprs_in_params
from scipy import special, stats

import dpoptax
from dpoptax import accounting, auditing, sampling, tables
from dpoptax._release.ledger import replace_key
from dpoptax.tables._row_selecting_noise import _count_above, draw_rows
from dpoptax.tables._row_selection import count_rows
from tests.helpers import after_releases, event_epsilon
from tests.oracles import adafest as oracle

pytestmark = pytest.mark.usefixtures("no_room")

KEY = jax.random.key(0)
V, D, B, L = 50, 3, 12, 4
SELECTION = tables.RowSelection(table_size=V, capacity=16, threshold=2.0, rows_per_example=2)
CLIP = tables.row_selecting_clip(dpoptax.l2_clip(0.4), SELECTION, share=0.2)


def table_of(params):
    return params["table"]


def loss_fn(params, example):
    lookups, target = example
    mean = jnp.mean(tables.look_up(params["table"], lookups), axis=0)
    return 0.5 * (mean @ params["weights"] + params["bias"] - target) ** 2


GRAD_FN = tables.selected_grad(loss_fn, CLIP, where=table_of)
COMPILED_GRAD = jax.jit(GRAD_FN)


def of_user(params, user):
    """Computes the loss of a user, treated as one example."""
    return dpoptax.users.per_user_loss(loss_fn)(params, user)


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


def noise(clip=CLIP, noise_multiplier=0.0, batch_size=B, key=KEY):
    return tables.row_selecting_noise(
        clip, noise_multiplier=noise_multiplier, batch_size=batch_size, key=key
    )


COUNTED = jax.jit(count_rows, static_argnums=2)


def counts_of(lookups, mask=None, selection=SELECTION):
    """Returns the counts, (V,) in float64, from `count_rows`."""
    mask = np.ones(len(lookups), bool) if mask is None else mask
    found = COUNTED(jnp.asarray(lookups), jnp.asarray(mask), selection)
    rows, unit = np.asarray(found.rows), 2.0 ** -int(found.bits)
    counts = np.zeros(selection.table_size)
    inside = rows < selection.table_size
    assert len(set(rows[inside])) == inside.sum()
    missing = np.asarray(found.missing, np.float64)
    counts[rows[inside]] = (math.ceil(selection.threshold / unit) - missing[inside]) * unit
    return counts


def test_noiseless_steps_match_the_paper():
    rng, tx = np.random.default_rng(1), optax.chain(noise(), optax.sgd(0.5))
    expected = some_params()
    params, state = as_arrays(expected), None
    state = tx.init(params)

    @jax.jit
    def step(params, state, batch, mask):
        found = GRAD_FN(state, params, batch, mask)
        updates, state = tx.update(found.sum, state, found.params)
        params = tables.apply_updates(params, updates, found.rows.rows, where=table_of)
        return params, state, found.rows

    for _ in range(4):
        lookups, targets, mask = some_lookups(rng), rng.normal(size=B), rng.random(B) < 0.8
        expected, selected = oracle.step(
            expected, lookups, targets, mask,
            threshold=2.0, bound=2, clip_norm=0.4, batch_size=B, rate=0.5,
        )  # fmt: skip
        batch = jnp.asarray(lookups), jnp.asarray(targets, jnp.float32)
        params, state, rows = step(params, state, batch, jnp.asarray(mask))
        assert 0 < len(selected) < SELECTION.capacity
        filling = [V] * (SELECTION.capacity - len(selected))
        assert np.asarray(rows.rows).tolist() == [*selected, *filling]
        assert rows.number == len(selected)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-4, atol=1e-5)
    assert dpoptax.ledgers(state)[0].releases == 4


def test_sum_is_independent_of_microbatches_and_order():
    def noisy_loss(params, example, key):
        return loss_fn(params, example) * (1.0 + jax.random.uniform(key))

    params, state = as_arrays(some_params()), noise().init(None)
    rng = np.random.default_rng(4)
    lookups, targets = some_lookups(rng), rng.normal(size=B).astype(np.float32)
    order, sums = rng.permutation(B), []
    for size, places in ((None, np.arange(B)), (5, order)):
        grad_fn = tables.selected_grad(noisy_loss, CLIP, where=table_of, microbatch_size=size)
        batch = lookups[places], targets[places]
        found = jax.jit(grad_fn)(state, params, batch, key=jax.random.key(9), ids=places)
        sums.append((found.sum.sum, found.rows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *sums)


def test_counts_match_the_paper():
    lookups = some_lookups(np.random.default_rng(2), batch=40)
    mask = np.arange(40) % 5 > 0
    expected = sum(oracle.contributions(row, V, 2) for row in lookups[mask])
    np.testing.assert_allclose(counts_of(lookups, mask), expected, rtol=1e-6)


@pytest.mark.parametrize("bound", [1, 2, 3, 7])
def test_example_moves_counts_by_at_most_their_bound(bound):
    selection = tables.RowSelection(
        table_size=V, capacity=16, threshold=2.0, rows_per_example=bound
    )
    rng = np.random.default_rng(bound)
    extremes = np.iinfo(np.int32)
    worst = 0.0
    candidates = [rng.choice(V, 10, replace=False), np.arange(10) % bound, [extremes.min] * 10]
    candidates += [np.r_[rng.choice(V, n), [-1, extremes.max, V] * 4][:10] for n in range(11)]
    for candidate in map(np.asarray, candidates):
        lookups = np.stack([candidate, *rng.integers(0, V, (7, 10))]).astype(np.int32)
        with_it, without = np.ones(8, bool), np.arange(8) > 0
        moved = counts_of(lookups, with_it, selection) - counts_of(lookups, without, selection)
        worst = max(worst, float(moved @ moved))
    assert 0.9999 * bound < worst <= bound  # exact, because the weights are integers


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


def selected_often(lookups, selection, noise_multiplier, draws=10_000, seed=0):
    """Returns the selection of each row, (draws, V), and the number before truncation."""
    counts = count_rows(jnp.asarray(lookups), jnp.ones(len(lookups), bool), selection)
    keys = jax.random.split(jax.random.key(seed), draws)
    rows, number = jax.jit(
        jax.vmap(lambda key: draw_rows(counts, selection, noise_multiplier, key))
    )(keys)
    assert bool(jnp.all(rows[:, 1:] >= rows[:, :-1]))
    hits = np.zeros((draws, selection.table_size + 1), int)
    np.add.at(hits, (np.arange(draws)[:, None], np.asarray(rows)), 1)
    assert hits[:, :-1].max() == 1  # no row is selected twice
    return hits[:, :-1] > 0, np.asarray(number)


def law(counts, selection, noise_multiplier):
    """Returns the probability of each row."""
    stddev = noise_multiplier * math.sqrt(selection.rows_per_example)
    return stats.norm.sf((selection.threshold - counts) / stddev)


LOOKUPS = np.array([[0, 1], [0, 2], [0, 0], [3, -1]], np.int32)


def test_selection_follows_law_of_noise_on_every_count():
    selection = tables.RowSelection(table_size=12, capacity=12, threshold=1.7, rows_per_example=2)
    hits, number = selected_often(LOOKUPS, selection, noise_multiplier=0.9)
    expected = law(counts_of(LOOKUPS, selection=selection), selection, 0.9)
    assert expected.min() < 0.1
    assert expected.max() > 0.8
    errors = (hits.mean(axis=0) - expected) / np.sqrt(expected * (1 - expected) / len(hits))
    assert np.abs(errors).max() < 4.5
    correlations = np.corrcoef(hits.T) - np.eye(12)
    assert np.abs(correlations).max() * np.sqrt(len(hits)) < 4.5
    np.testing.assert_array_equal(number, hits.sum(axis=1))


def test_truncation_does_not_depend_on_the_data():
    selection = tables.RowSelection(table_size=12, capacity=2, threshold=2.0, rows_per_example=2)
    hits, number = selected_often(LOOKUPS, selection, noise_multiplier=0.6)
    whole = tables.RowSelection(table_size=12, capacity=12, threshold=2.0, rows_per_example=2)
    chances = law(counts_of(LOOKUPS, selection=whole), whole, 0.6)
    assert (number > 2).mean() > 0.05
    assert hits.sum(axis=1).max() == 2
    expected = np.zeros(12)
    for subset in itertools.product([False, True], repeat=12):
        which = np.array(subset)
        chance = np.prod(np.where(which, chances, 1 - chances))
        expected[which] += chance * min(1.0, 2 / max(1, which.sum()))
    errors = (hits.mean(axis=0) - expected) / np.sqrt(expected * (1 - expected) / len(hits))
    assert np.abs(errors).max() < 4.5


def test_ties_are_truncated_by_row_number_alone(monkeypatch):
    """Ties, frequent among 10⁵ rows, are resolved independently of the lookups."""
    bits = jax.random.bits

    def equal(key, shape, dtype):
        ties = len(shape) == 1 and shape[0] > 2  # other draws belong to the noise
        return jnp.zeros(shape, dtype) if ties else bits(key, shape, dtype)

    monkeypatch.setattr(jax.random, "bits", equal)
    selection = tables.RowSelection(table_size=12, capacity=2, threshold=2.0, rows_per_example=2)
    hits, number = selected_often(LOOKUPS + 8, selection, noise_multiplier=0.6)
    # Rows 0 and 1 were not looked up. If selected, they are kept, because they come first.
    chance = special.ndtr(-2.0 / (0.6 * math.sqrt(2)))
    errors = (hits[:, :2].mean(axis=0) - chance) / math.sqrt(chance / len(hits))
    assert (number > 2).mean() > 0.05
    assert np.abs(errors).max() < 4.5


def test_tail_rows_are_selected_with_their_probability():
    """Checks six standard deviations, beyond the reach of float32 normals."""
    size, stddev = 2**29, 1.0
    selection = tables.RowSelection(table_size=size, capacity=4, threshold=6.0)
    counts = count_rows(jnp.full((8, 1), -1), jnp.ones(8, bool), selection)
    _, number = jax.jit(jax.vmap(lambda key: draw_rows(counts, selection, stddev, key)))(
        jax.random.split(KEY, 20_000)
    )
    expected = size * stats.norm.sf(6.0)
    assert abs(float(number.mean()) - expected) < 4.5 * math.sqrt(expected / 20_000)


def test_limits_are_compared_in_all_64_bits():
    high, low = (int(word) for word in jax.random.bits(KEY, (2,), jnp.uint32))
    limits = [[high - 1, 2**32 - 1], [high, low - 1], [high, low], [high, low + 1], [high + 1, 0]]
    reached = [int(_count_above(np.array([limit], np.uint32), KEY)) for limit in limits]
    assert reached == [1, 1, 1, 0, 0]


def gaussian_delta(epsilon, noise_multiplier):
    """Returns δ(ε) of the Gaussian mechanism (Balle and Wang, 2018), in the worse direction."""
    mu = 1 / noise_multiplier
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
        -mu / 2 - epsilon / mu
    )


@pytest.mark.parametrize("lookups", [[0, 1, 2, 3], [5, 5, -1, 9], [4, 5, 4, 5]])
def test_selection_costs_at_most_its_gaussian(lookups):
    """Sums δ over all sets of rows, for an added and a removed example."""
    selection = tables.RowSelection(table_size=6, capacity=6, threshold=1.5, rows_per_example=2)
    others = np.array([[0, 1, 4, -1], [4, 5, -1, -1], [0, 0, 0, 0]], np.int32)
    neighbors = others, np.concatenate([others, np.array([lookups], np.int32)])
    chances = [law(counts_of(n, selection=selection), selection, 1.1) for n in neighbors]
    sets = np.array(list(itertools.product([False, True], repeat=6)))
    p, q = (np.prod(np.where(sets, c, 1 - c), axis=1) for c in chances)
    for epsilon in (0.0, 0.5, 1.5):
        spent = max(np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ((p, q), (q, p)))
        assert spent <= gaussian_delta(epsilon, 1.1)
        if epsilon == 0.0 and lookups != [5, 5, -1, 9]:
            assert spent > 0.4 * gaussian_delta(epsilon, 1.1)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5])
def test_two_multipliers_compose_to_the_ledgers(share):
    clip = tables.row_selecting_clip(dpoptax.l2_clip(2.0), SELECTION, share=share)
    sigma = 6.5
    # For the gradient: the noise's standard deviation over the example's contribution, 2.
    gradient = sigma * clip.sensitivity / 2.0
    rows = sigma / math.sqrt(share)
    step = dpa.ComposedDpEvent([dpa.GaussianDpEvent(rows), dpa.GaussianDpEvent(gradient)])
    both = dpa.SelfComposedDpEvent(step, 7)
    run = {"noise_multiplier": sigma, "sampling_probability": 1.0, "steps": 7}
    for accountant in ("pld", "rdp"):
        one = accounting.planned_guarantee(**run, accountant=accountant).epsilon(1e-5)
        found = event_epsilon(both, 1e-5, accountant=accountant)
        assert found == pytest.approx(one, rel=1e-3)


def test_step_draws_rows_and_noise_with_these_multipliers():
    sigma, share = 1.5, 0.2
    selection = tables.RowSelection(table_size=4000, capacity=400, threshold=8.0)
    clip = tables.row_selecting_clip(dpoptax.l2_clip(0.4), selection, share=share)
    tx = noise(clip, sigma, batch_size=10)
    params = {"table": jnp.zeros((4000, 40)), "weights": jnp.zeros(40), "bias": jnp.zeros(())}
    grad_fn = jax.jit(tables.selected_grad(loss_fn, clip, where=table_of))
    update = jax.jit(tx.update)
    state, numbers, entries = tx.init(params), [], []
    batch = jnp.full((10, L), -1), jnp.zeros(10)
    for _ in range(30):
        found = grad_fn(state, params, batch)
        released, state = update(found.sum, state, found.params)
        numbers.append(int(found.rows.number))
        entries.append(np.asarray(released["table"]))
    expected = 4000 * stats.norm.sf(8.0 * math.sqrt(share) / sigma)
    assert abs(np.mean(numbers) - expected) < 4.5 * math.sqrt(expected / 30)
    stddev = np.std(entries)
    assert stddev == pytest.approx(sigma / math.sqrt(1 - share) * 0.4 / 10, rel=0.01)
    assert dpoptax.ledgers(state)[0].mechanism.noise_multiplier == sigma


def sum_and_state(tx, seed=0, params=None):
    params = as_arrays(some_params()) if params is None else params
    rng = np.random.default_rng(seed)
    batch = jnp.asarray(some_lookups(rng)), jnp.asarray(rng.normal(size=B), jnp.float32)
    state = tx.init(params)
    return COMPILED_GRAD(state, params, batch), state


def test_sum_is_released_once_by_its_own_state():
    found, state = sum_and_state(noise())
    update = jax.jit(noise().update)
    released, after = update(found.sum, state)
    assert dpoptax.ledgers(after)[0].releases == 1
    assert np.isfinite(released["bias"])
    again, twice = update(found.sum, after)
    assert np.isnan(again["bias"])
    with pytest.raises(ValueError, match="rows were selected for another release"):
        dpoptax.ledgers(twice)
    other = noise(key=jax.random.key(5))
    released, _ = other.update(found.sum, other.init(None))
    assert np.isnan(released["weights"]).all()


@pytest.mark.parametrize("masked", [False, True])
def test_without_a_mask_the_batch_must_have_the_stages_size(masked):
    tx = noise(batch_size=B - 1)
    state, rng = tx.init(None), np.random.default_rng(0)
    batch = jnp.asarray(some_lookups(rng)), jnp.asarray(rng.normal(size=B), jnp.float32)
    mask = jnp.ones(B, bool) if masked else None
    found = COMPILED_GRAD(state, as_arrays(some_params()), batch, mask)
    if masked:
        tx.update(found.sum, state)
    else:
        with pytest.raises(ValueError, match="batch_size"):
            tx.update(found.sum, state)


def test_refuses_sum_without_selected_rows():
    params = as_arrays(some_params())
    sums = [
        dpoptax.extend.trust_clipped({"w": jnp.zeros(2)}, CLIP),
        jax.jit(dpoptax.clipped_grad(loss_fn, CLIP))(
            dpoptax.gradient_points((), params), (jnp.zeros((B, L), int), jnp.zeros(B))
        ),
    ]
    for total in sums:
        with pytest.raises(TypeError, match="were not selected with"):
            noise().update(total, noise().init(None))


def test_accumulate_refuses_sums_with_selected_rows():
    parts = [sum_and_state(noise(), seed)[0].sum for seed in (0, 1)]
    with pytest.raises(ValueError, match="Sums with selected rows"):
        dpoptax.accumulate(*parts)


def test_refuses_changed_sum():
    found, state = sum_and_state(noise())
    total, context = found.sum.sealed
    changed = dataclasses.replace(found.sum, sealed=({**total, "bias": jnp.ones(())}, context))
    with pytest.raises(TypeError, match="those that were clipped"):
        noise().update(changed, state)
    with pytest.raises(TypeError, match="private until the noise stage"):
        jax.tree.map(lambda x: x * 2, found.sum)


@pytest.mark.parametrize(
    "stage",
    [
        dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=B, key=KEY),
        dpoptax.correlated_noise(
            dpoptax.matrix.BandedToeplitz((1.0, 0.5)), noise_multiplier=1.0, batch_size=B, key=KEY
        ),
        dpoptax.contrib.geodp(0.1, noise_multiplier=1.0, batch_size=B, key=KEY),
    ],
    ids=["gaussian", "correlated", "geodp"],
)
def test_other_noise_stages_refuse_selected_rows(stage):
    total = dpoptax.extend.trust_clipped({"w": jnp.zeros(2)}, CLIP)
    with pytest.raises(TypeError, match="row_selecting_noise"):
        stage.update(total, stage.init({"w": jnp.zeros(2)}))


def test_noise_stage_refuses_sums_of_other_clips():
    total = dpoptax.extend.trust_clipped({"w": jnp.zeros(2)}, dpoptax.l2_clip(1.0))
    with pytest.raises(TypeError, match="this stage was made with RowSelectingClip"):
        noise().update(total, noise().init(None))
    other = tables.row_selecting_clip(dpoptax.l2_clip(0.4), SELECTION, share=0.3)
    found, _ = sum_and_state(noise())
    with pytest.raises(TypeError, match="the same clip to both"):
        noise(other).update(found.sum, noise(other).init(None))


SECOND_USES = {
    "tied": lambda p, x: loss_fn(p, x) + jnp.sum(p["table"] @ p["weights"]),
    "indexed": lambda p, x: jnp.sum(p["table"][0]),
    "penalized": lambda p, x: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p)),
    "by an array": lambda p, x: jnp.sum(jnp.tanh(p["table"])),
    "by lax": lambda p, x: jnp.sum(jax.lax.exp(p["table"])),
    "compiled": lambda p, x: jax.jit(lambda table: table.sum())(p["table"]),
}


@pytest.mark.parametrize("loss", SECOND_USES.values(), ids=SECOND_USES)
def test_refuses_second_use_of_the_table(loss):
    grad_fn = tables.selected_grad(loss, CLIP, where=table_of)
    params = as_arrays(some_params())
    with pytest.raises(TypeError) as raised:
        grad_fn(noise().init(None), params, (jnp.zeros((B, L), int), jnp.zeros(B)))
    shown = "".join(traceback.format_exception_only(raised.value))
    assert shown.count("must read the table only by") == 1


@pytest.mark.parametrize(
    ("behind", "what"),
    [
        (dpoptax.disk(0.7, 0.5), "gradient points"),
        (dpoptax.pmlf(2, 0.1, *dpoptax.filters.preset("doppler-first-order-1")), "gradient points"),
        (
            dpoptax.doppler(*dpoptax.filters.preset("doppler-first-order-1")),
            "per table entry",
        ),
        (optax.adam(0.1), "per table entry"),
        (optax.sgd(0.1, momentum=0.9), "per table entry"),
    ],
    ids=["disk", "pmlf", "doppler", "adam", "momentum"],
)
def test_refuses_methods_that_remember_other_rows(behind, what):
    params = as_arrays(some_params())
    state = optax.chain(noise(), behind).init(params)
    with pytest.raises(ValueError, match=what):
        GRAD_FN(state, params, (jnp.zeros((B, L), int), jnp.zeros(B)))


def test_other_parameters_accept_any_optimizer():
    labels = {"table": "table", "weights": "rest", "bias": "rest"}
    tx = optax.chain(
        noise(), optax.partition({"table": optax.sgd(0.1), "rest": optax.adam(0.1)}, labels)
    )
    found, state = sum_and_state(tx)
    updates, _ = tx.update(found.sum, state, found.params)
    assert updates["table"].shape == (SELECTION.capacity, D)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tables.RowSelection(table_size=9, capacity=10, threshold=1.0), ValueError, "fits"),
        (lambda: tables.RowSelection(table_size=9, capacity=0, threshold=1.0), ValueError, "capac"),
        (lambda: tables.RowSelection(table_size=9, capacity=2, threshold=0), ValueError, "thresh"),
        (lambda: tables.RowSelection(table_size=9.5, capacity=2, threshold=1), TypeError, "intege"),
        (lambda: tables.RowSelection(table_size=9, capacity=2, threshold=1.0, rows_per_example=0),
         ValueError, "rows_per_example"),
        (lambda: tables.row_selecting_clip(dpoptax.l2_clip(1.0), None), TypeError, "selection"),
        (lambda: tables.row_selecting_clip(dpoptax.l2_clip(1.0), SELECTION, share=1.0),
         ValueError, "share"),
        (lambda: tables.row_selecting_clip(dpoptax.contrib.adaptive_clip(1.0), SELECTION),
         TypeError, "select_rows"),
        (lambda: tables.row_selecting_clip(
            dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=1.0), SELECTION), TypeError,
            "select_rows"),
        (lambda: tables.selected_grad(loss_fn, dpoptax.l2_clip(1.0), where=table_of),
         TypeError, "row_selecting_clip"),
        (lambda: tables.selected_grad(of_user, CLIP, where=table_of)(
            noise().init(None), as_arrays(some_params()),
            (jnp.zeros((B, L), int), jnp.ones((B, L), bool))), TypeError, "hold records of others"),
        (lambda: noise(noise_multiplier=50.0), ValueError, "Increase the threshold"),
        (lambda: noise(dpoptax.l2_clip(1.0)), TypeError, "row_selecting_clip"),
        (lambda: GRAD_FN((), as_arrays(some_params()), (jnp.zeros((B, L), int), jnp.zeros(B))),
         ValueError, "row_selecting_noise"),
        (lambda: GRAD_FN(noise().init(None), as_arrays(some_params()), jnp.zeros((B, L), int)),
         TypeError, "pair"),
        (lambda: GRAD_FN(noise().init(None), as_arrays(some_params()), (jnp.zeros((B, L)), 0)),
         TypeError, "integers"),
        (lambda: GRAD_FN(noise().init(None), {"table": jnp.zeros((9, D))},
                         (jnp.zeros((B, L), int), jnp.zeros(B))), ValueError, "got 9"),
        (lambda: tables.selected_grad(loss_fn, CLIP, where=lambda p: p)(
            noise().init(None), as_arrays(some_params()), (jnp.zeros((B, L), int), jnp.zeros(B))),
         ValueError, "where"),
        (lambda: tables.locate(jnp.zeros(3, int), jnp.zeros(0, int)), ValueError, "at least 1"),
        (lambda: tables.locate(jnp.zeros(3), jnp.zeros(1, int)), TypeError, "integers"),
    ],
)  # fmt: skip
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_refuses_threshold_that_no_batch_can_reach():
    selection = tables.RowSelection(table_size=V, capacity=5, threshold=1e6)
    with pytest.raises(ValueError, match="is below it"):
        count_rows(jnp.zeros((4, 1), int), jnp.ones(4, bool), selection)


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
def test_step_creates_no_other_array_of_table_size():
    size = 200_000
    selection = tables.RowSelection(table_size=size, capacity=8, threshold=12.0)
    clip = tables.row_selecting_clip(dpoptax.l2_clip(1.0), selection)
    tx = optax.chain(noise(clip, 0.5), optax.sgd(0.1))
    grad_fn = tables.selected_grad(loss_fn, clip, where=table_of)
    params = {"table": jnp.zeros((size, D)), "weights": jnp.ones(D), "bias": jnp.zeros(())}

    def step(params, state, accumulator, batch):
        found = grad_fn(state, params, batch)
        updates, state = tx.update(found.sum, state, found.params)
        rows = found.rows.rows
        table, accumulator = tables.rowwise_adagrad(
            params["table"], accumulator, rows, updates["table"], learning_rate=0.1
        )
        params = tables.apply_updates({**params, "table": table}, updates, rows, where=table_of)
        return params, state, accumulator

    arguments = params, tx.init(params), jnp.zeros(size)
    batch = jnp.zeros((B, L), int), jnp.zeros(B)
    program = jax.make_jaxpr(step)(*arguments, batch)
    assert set(large_arrays(program.jaxpr, size)) == {"scatter-add", "scatter"}
    compiled = jax.jit(step, donate_argnums=(0, 1, 2)).lower(*arguments, batch).compile()
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
    counts = counts_of(
        lookups[:, None],
        selection=tables.RowSelection(table_size=300, capacity=3, threshold=1.0),
    )
    assert counts.sum() == sum(expected)


def test_vocabulary_contains_frequent_rows():
    rng = np.random.default_rng(0)
    lookups = np.minimum(rng.geometric(0.02, (3000, 2)) - 1, 9999)
    selection = tables.RowSelection(
        table_size=10_000, capacity=200, threshold=40.0, rows_per_example=2
    )
    found = tables.select_rows(lookups, selection=selection, noise_multiplier=5.0, key=KEY)
    counts = counts_of(lookups, selection=selection)
    # Four standard deviations of the noise on a count.
    missing = set(np.flatnonzero(counts > 40 + 4 * 5 * math.sqrt(2))) - set(found.rows.tolist())
    assert not missing
    assert counts[found.rows].min() > 40 - 4 * 5 * math.sqrt(2)
    assert found.selected == len(found.rows)


def test_vocabulary_is_priced_with_the_run():
    event = tables.select_rows(
        np.zeros((9, 1), int),
        selection=tables.RowSelection(table_size=9, capacity=3, threshold=6.0),
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


def test_vocabulary_without_noise_has_infinite_epsilon():
    selection = tables.RowSelection(table_size=9, capacity=2, threshold=1.0)
    found = tables.select_rows([[1], [2]], selection=selection, noise_multiplier=0, key=KEY)
    assert found.rows.tolist() == [1, 2]
    assert event_epsilon(found.event, 1e-5) == math.inf
    with pytest.raises(ValueError, match="No row was selected"):
        tables.select_rows([[-1]], selection=selection, noise_multiplier=0, key=KEY)


@pytest.mark.slow
def test_rowwise_adagrad_equals_dense_adagrad():
    rng = np.random.default_rng(0)
    table, accumulator = rng.normal(size=(6, 2)), np.zeros(6)
    sparse = jnp.asarray(table), jnp.asarray(accumulator)
    for rows in ([0, 3, 6, 6], [1, 3, 5, 6]):
        gradient = rng.normal(size=(4, 2))
        for row, g in zip(rows, gradient, strict=True):
            if row < 6:
                accumulator[row] += np.mean(g**2)
                table[row] -= 0.3 * g / (np.sqrt(accumulator[row]) + 1e-8)
        sparse = tables.rowwise_adagrad(
            *sparse, jnp.array(rows), jnp.asarray(gradient), learning_rate=0.3
        )
    np.testing.assert_allclose(sparse[0], table, rtol=1e-5)
    np.testing.assert_allclose(sparse[1], accumulator, rtol=1e-5)


@pytest.mark.slow
def test_audit_of_whole_steps_confirms_the_claim():
    """Uses the likelihood ratio of rows and release for the only example with two lookups."""
    sigma, share, clip_norm, runs = 0.5, 0.5, 1.0, 40_000
    selection = tables.RowSelection(table_size=V, capacity=16, threshold=1.0, rows_per_example=2)
    clip = tables.row_selecting_clip(dpoptax.l2_clip(clip_norm), selection, share=share)
    tx, table = noise(clip, sigma, batch_size=2), jnp.zeros((V, D))
    grad_fn = tables.selected_grad(
        lambda table, example: 9.0 * jnp.sum(tables.look_up(table, example[0])), clip,
        where=lambda tree: tree,
    )  # fmt: skip
    batch = jnp.array([[7, 8], [-1, -1]]), jnp.zeros(2)
    begun = tx.init(table)

    def step(key, mask):
        state = dataclasses.replace(begun, noise=replace_key(begun.noise, key))
        found = grad_fn(state, table, batch, mask)
        released, _ = tx.update(found.sum, state)
        values = jnp.zeros((V, D)).at[found.rows.rows].set(2 * released, mode="drop")
        chosen = jnp.zeros(V, bool).at[found.rows.rows].set(True, mode="drop")
        return values[7:9], chosen[7:9]

    run = jax.jit(jax.vmap(step, in_axes=(0, None)))
    one, two = jnp.array([True, True]), jnp.array([False, True])
    keys = jax.random.split(jax.random.key(2), 2 * runs)
    with_it, without = run(keys[:runs], one), run(keys[runs:], two)
    chance = [law(np.array([c]), selection, sigma / math.sqrt(share)).item() for c in (0.0, 1.0)]
    stddev = sigma / math.sqrt(1 - share) * clip_norm

    def score(seen):
        values, chosen = (np.asarray(x, np.float64) for x in seen)
        each = np.where(chosen, chance[1] / chance[0], (1 - chance[1]) / (1 - chance[0]))
        number = np.maximum(chosen.sum(axis=1), 1)
        shift = clip_norm / np.sqrt(number * D)[:, None] * chosen
        along = (values.sum(axis=2) * shift).sum(axis=1)
        shown = chosen.any(axis=1) * clip_norm**2 / 2
        return np.log(each).sum(axis=1) + (along - shown) / stddev**2

    curve = auditing.trade_off_curve(score(with_it), score(without), np.linspace(-4, 6, 41))
    assert not curve.refutes(auditing.gaussian_trade_off(1 / sigma))
    # The observations exceed the claim of each release without the other.
    assert curve.refutes(auditing.gaussian_trade_off(math.sqrt(1 - share) / sigma))
    assert curve.refutes(auditing.gaussian_trade_off(math.sqrt(share) / sigma))
