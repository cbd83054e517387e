"""Tests of a user as one example: record selection, and one clip per user."""

import collections
import dataclasses
import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax import accounting
from dpoptax.sampling import FixedSizeSampler, PoissonSampler, RandomAllocationSampler, Sample
from dpoptax.users import UserTable, per_user_loss
from tests.helpers import (
    after_releases,
    global_norm,
    mlp_batch,
    mlp_loss,
    mlp_params,
    planned_epsilon,
)
from tests.networks import NETWORKS

pytestmark = pytest.mark.usefixtures("no_room")

USERS, EACH, BOUND = 4, 3, 0.5
RECORDS_MASK = np.array([[1, 1, 1], [1, 0, 1], [0, 1, 0], [0, 0, 0]], bool)
OWNERS = ["cy"] * 5 + ["ada"] + ["bob"] * 9 + ["cy"] * 2 + ["dee"] * 2


@functools.cache
def sum_of_users(reduction):
    """Returns the clipped sum of four users with room for three records each, compiled once."""
    grad_fn = jax.jit(
        dpoptax.clipped_grad(per_user_loss(mlp_loss, reduction=reduction), dpoptax.l2_clip(BOUND))
    )
    points = dpoptax.gradient_points((), mlp_params(0))
    return lambda records, records_mask, mask=None: (
        grad_fn(points, (records, records_mask), mask).sum
    )


def users_of_mlp(seed=0):
    x, y = mlp_batch(seed, USERS * EACH)
    return x.reshape(USERS, EACH, -1), y.reshape(USERS, EACH)


def difference(left, right):
    return global_norm(jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), left, right))


def assert_same_bits(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sum_clips_each_users_gradient_once(reduction):
    records = users_of_mlp()
    params = mlp_params(0)
    of_records = jax.vmap(jax.vmap(jax.grad(mlp_loss), (None, 0)), (None, 0))
    each = jax.tree.map(np.float64, jax.jit(of_records)(params, records))
    expected, norms = jax.tree.map(np.zeros_like, params), []
    for user, mask in enumerate(RECORDS_MASK):
        weights = mask / max(mask.sum(), 1) if reduction == "mean" else mask * 1.0
        own = jax.tree.map(lambda g, u=user, w=weights: np.tensordot(w, g[u], 1), each)
        norms.append(global_norm(own))
        scale = min(1.0, BOUND / max(norms[-1], 1e-30))
        expected = jax.tree.map(lambda total, g, s=scale: total + s * g, expected, own)
    assert max(norms) > BOUND  # the clip is active
    assert difference(sum_of_users(reduction)(records, RECORDS_MASK), expected) < 3e-5


@pytest.mark.parametrize("records", [0, 1, 2, 3])
def test_loss_is_mean_or_sum_of_own_records(records):
    values, mask = jnp.array([3.0, 5.0, 13.0]), jnp.arange(3) < records
    total = [0.0, 3.0, 8.0, 21.0][records]
    loss = lambda w, x: w * x  # noqa: E731
    for reduction, expected in (("sum", total), ("mean", total / max(records, 1))):
        assert per_user_loss(loss, reduction=reduction)(1.0, (values, mask)) == expected


@pytest.mark.parametrize("name", ["mlp", "transformer"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_layer_falls_back_to_per_user_gradients(name, reduction):
    network = NETWORKS[name]
    example = network.batch(0, EACH), jnp.ones(EACH, bool)
    found = dpoptax.explain(
        per_user_loss(network.loss, reduction=reduction), network.params(0), example
    )
    assert found.fallbacks == ()
    for row in found.rows:
        if row.parameter in ("['w']", "['v']", "['q']", "['d']"):
            assert row.uses == "dot_general"
            assert row.rule != "per-example gradient"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("hostile", [1.0, 1e3, 1e18, 3e38, np.inf, np.nan, "canceling"])
def test_user_moves_sum_by_at_most_the_bound(reduction, hostile):
    x, y = users_of_mlp()
    if hostile == "canceling":  # gradients of two labels at one input, in opposite directions
        x, y = x.at[0].set(1e6), y.at[0].set(jnp.array([0, 1, 2]))
    else:
        x = x.at[0, 1].multiply(hostile)
    total = sum_of_users(reduction)
    records_mask = np.ones_like(RECORDS_MASK)
    others = total((x, y), records_mask, np.array([0, 1, 1, 1], bool))
    everybody = total((x, y), records_mask, np.ones(USERS, bool))
    moved = difference(everybody, others)
    assert moved <= 1.0001 * BOUND
    if hostile in (1.0, 1e3):
        assert moved > 0.9 * BOUND


def test_user_with_nan_record_adds_exactly_zero():
    x, y = users_of_mlp()
    total = sum_of_users("mean")
    without = total((x, y), RECORDS_MASK, np.array([0, 1, 1, 1], bool))
    assert_same_bits(total((x.at[0, 2].set(jnp.nan), y), RECORDS_MASK), without)
    assert difference(total((x, y), RECORDS_MASK), without) > 0.1


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_padding_does_not_change_the_sum(reduction):
    x, y = users_of_mlp()
    total = sum_of_users(reduction)
    clean = total((x, y), RECORDS_MASK)
    for padding in (0.0, 1e38, np.inf, np.nan):
        padded = jnp.where(RECORDS_MASK[..., None], x, padding)
        assert_same_bits(total((padded, y), RECORDS_MASK), clean)


def test_user_without_records_adds_exactly_zero():
    records = users_of_mlp()
    for reduction in ("mean", "sum"):
        total = sum_of_users(reduction)(records, np.zeros_like(RECORDS_MASK))
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_padding_does_not_change_the_count(method):
    """A user without records has a zero or NaN gradient, for any record in its padding."""
    clip = dpoptax.contrib.adaptive_clip(1.0, count_share=0.25)
    tx = dpoptax.contrib.adaptive_gaussian_noise(
        clip, noise_multiplier=1.0, batch_size=4, key=jax.random.key(0)
    )
    w = jnp.zeros(2)
    points = dpoptax.gradient_points(tx.init(w), w)
    loss = per_user_loss(lambda w, x: jnp.sum(w * x))
    grad_fn = jax.jit(dpoptax.clipped_grad(loss, clip, method=method))
    mask = jnp.zeros((9, 3), bool).at[0].set(True)  # eight users have none

    def total(padding):
        return grad_fn(points, (jnp.where(mask[..., None], 1.0, padding), mask)).sum

    clean = total(0.5)
    assert clean.count == pytest.approx(8 * 0.5 - 0.5, abs=1e-3)
    for padding in (0.0, 3e38, np.inf, np.nan):
        assert_same_bits(total(padding), clean)


def test_keys_depend_on_user_and_differ_among_records():
    def noisy(w, x, key):
        return jnp.sum(w * (x + jax.random.normal(key, x.shape)))

    grad_fn = dpoptax.clipped_grad(per_user_loss(noisy, has_aux=False), dpoptax.l2_clip(100.0))
    points = dpoptax.gradient_points((), jnp.ones(2))
    records, mask, key = jnp.zeros((2, 3, 2)), jnp.ones((2, 3), bool), jax.random.key(3)

    def of(ids, which):
        batch = records, mask.at[:, 2].set(False)
        return grad_fn(points, batch, jnp.array(which), key=key, ids=jnp.array(ids)).sum

    np.testing.assert_array_equal(of([7, 1], [True, False]), of([1, 7], [False, True]))
    keys = jax.random.split(jax.random.fold_in(key, 7), 3)
    own = np.stack([jax.random.normal(k, (2,)) for k in keys])
    np.testing.assert_allclose(of([7, 1], [True, False]), own[:2].mean(0), rtol=1e-5)


def test_aux_is_per_record():
    loss = per_user_loss(lambda w, x: (jnp.sum(w * x), x[0]), has_aux=True)
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.l2_clip(1.0), has_aux=True)
    records = jnp.arange(12.0).reshape(2, 3, 2)
    batch = records, jnp.ones((2, 3), bool)
    _, aux = grad_fn(dpoptax.gradient_points((), jnp.ones(2)), batch)
    np.testing.assert_array_equal(aux, records[..., 0])


@pytest.mark.parametrize(
    ("user", "error", "message"),
    [
        (jnp.ones((3, 2)), ValueError, "must be a pair"),
        ([jnp.ones((3, 2)), jnp.ones(3, bool)], ValueError, "must be a pair .* got a list"),
        ((jnp.ones((3, 2)), jnp.ones(3, bool), 0), ValueError, "must be a pair"),
        ((jnp.ones((3, 2)), jnp.ones(3)), TypeError, "must be bool, got float32"),
        ((jnp.ones((3, 2)), jnp.ones((3, 1), bool)), ValueError, r"shape \(R,\).* got \(3, 1\)"),
        ((jnp.ones((2, 2)), jnp.ones(3, bool)), ValueError, r"shape \(3, …\).* got \(2, 2\)"),
    ],
)
def test_refuses_malformed_user(user, error, message):
    with pytest.raises(error, match=message):
        per_user_loss(lambda w, x: jnp.sum(w * x))(jnp.ones(2), user)


def test_refuses_non_scalar_loss_and_unknown_reduction():
    with pytest.raises(TypeError, match=r"must return a scalar for a record, got .* \(2,\)"):
        per_user_loss(lambda w, x: w * x)(jnp.ones(2), (jnp.ones((3, 2)), jnp.ones(3, bool)))
    with pytest.raises(ValueError, match="`reduction` must .* got 'max'"):
        per_user_loss(mlp_loss, reduction="max")


def owned_by(owners, label):
    return {place for place, owner in enumerate(owners) if owner == label}


@pytest.mark.parametrize("bound", [1, 2, 3, 20])
def test_draws_own_records_once_up_to_the_bound(bound):
    table = UserTable(OWNERS, bound, seed=0)
    sampler = table.sampler(PoissonSampler, batch_size=3, seed=1)
    seen = collections.Counter()
    for step in range(60):
        drawn = table.sample(sampler, step)
        users, mask = sampler.sample(step)
        np.testing.assert_array_equal(drawn.users, users)
        np.testing.assert_array_equal(drawn.mask, mask)
        assert drawn.records.shape == drawn.records_mask.shape == (len(users), bound)
        assert not drawn.records_mask[~mask].any()
        for user, records, counts in zip(users, drawn.records, drawn.records_mask, strict=True):
            owned = owned_by(OWNERS, sorted(set(OWNERS))[user])
            given = records[counts].tolist()
            assert set(given) <= owned
            assert len(set(given)) == len(given)
            assert len(given) in (0, min(bound, len(owned)))
            seen.update(given)
    assert set(seen) == set(range(len(OWNERS)))


def test_draws_uniform_subset_of_records_each_step():
    table = UserTable([0] * 6, 2, seed=5)
    sampler = table.sampler(PoissonSampler, batch_size=1, seed=0)
    steps = 1500
    pairs = collections.Counter(
        tuple(table.sample(sampler, step).records[0]) for step in range(steps)
    )
    expected = steps / 15
    assert len(pairs) == 15
    statistic = sum((count - expected) ** 2 / expected for count in pairs.values())
    assert statistic < 36.1  # the 99.9 % quantile of chi-squared with 14 degrees of freedom


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (7, 2**32), (2**200 + 3, 2**33 + 1)])
def test_draws_are_those_of_a_seed_sequence(seed, step):
    """Earlier versions drew for each user separately; restored runs repeat these draws."""
    table = UserTable(OWNERS, 2, seed=seed)
    drawn = _by_user(table.sample(table.sampler(FixedSizeSampler, batch_size=4, seed=0), step))
    for user, label in enumerate(sorted(set(OWNERS))):
        owned = np.flatnonzero(np.array(OWNERS) == label)
        words = np.frombuffer(hashlib.blake2b(label.encode(), digest_size=16).digest(), np.uint32)
        key = (*map(int, words), step)
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
        if len(owned) > 2:
            owned = owned[np.sort(rng.choice(len(owned), 2, replace=False, shuffle=False))]
        assert drawn[user] == owned.tolist()


def _by_user(drawn):
    rows = zip(drawn.users.tolist(), drawn.records, drawn.records_mask, strict=True)
    return {user: records[mask].tolist() for user, records, mask in rows}


def test_records_of_a_user_do_not_depend_on_others():
    whole = UserTable(OWNERS, 2, seed=9)
    everybody = whole.sampler(FixedSizeSampler, batch_size=4, seed=0)
    for gone in ("ada", "bob"):
        kept = [place for place, owner in enumerate(OWNERS) if owner != gone]
        rest = UserTable([OWNERS[place] for place in kept], 2, seed=9)
        labels = [label for label in sorted(set(OWNERS)) if label != gone]
        for step in range(5):
            given = _by_user(whole.sample(everybody, step))
            mine = _by_user(rest.sample(rest.sampler(FixedSizeSampler, batch_size=3, seed=0), step))
            for number, label in enumerate(labels):
                expected = given[sorted(set(OWNERS)).index(label)]
                assert [kept[place] for place in mine[number]] == expected


@pytest.mark.parametrize("owners", [["b", "\udc80", "\udc80"], jnp.array([0, 7, 7])])
def test_accepts_any_strings_and_arrays_as_owners(owners):
    """A file name that is not UTF-8 has lone surrogates."""
    table = UserTable(owners, 1, seed=0)
    drawn = table.sample(table.sampler(PoissonSampler, batch_size=2, seed=0), 0)
    assert drawn.records_mask.sum() == drawn.mask.sum() == 2


@pytest.mark.parametrize(
    ("owners", "error", "message"),
    [
        ([("ada", "bob"), ("cy", "dee")], ValueError, r"shape \(2, 2\).*of several users"),
        (["ada", ["bob", "cy"]], ValueError, "several at 1.*of several users"),
        (np.zeros((3, 2), int), ValueError, "one owner for each record"),
        (["ada", None], TypeError, r"owners\[1\]=None"),
        (["ada", float("nan")], TypeError, r"owners\[1\]=nan"),
        ([0, True], TypeError, r"owners\[1\]=True"),
        (np.array([0.0, 1.0]), TypeError, "`owners` must .* got float64"),
        ([3, -1], ValueError, r"owners\[1\]=-1\."),
        (["ada", ""], ValueError, r"owners\[1\]=''\."),
        (np.ma.array([1, 2, 2], mask=[0, 1, 0]), ValueError, "must not be masked, got a mask at 1"),
        ([2**127, 1], ValueError, "fit into 63 bits. Pass larger numbers as strings"),
        (["ada", "ada\0"], ValueError, r"must not end in NUL, got owners\[1\]='ada\\x00'"),
        ([], ValueError, "`owners` must not be empty"),
        (None, TypeError, "`owners` must .* got a NoneType. Pass the owner of each record"),
        ({0: "ada", 1: "ada"}, TypeError, "`owners` must .* got a dict"),
        ({"ada", "bob"}, TypeError, "`owners` must .* got a set"),
        ("ada", TypeError, "`owners` must .* got a str"),
    ],
)
def test_refuses_records_without_one_owner(owners, error, message):
    with pytest.raises(error, match=message):
        UserTable(owners, 2, seed=0)


def test_refuses_sampler_of_records():
    table = UserTable(OWNERS, 2, seed=0)
    with pytest.raises(
        ValueError, match="must draw the 4 users of this table, got one of 19 examples"
    ):
        table.sample(PoissonSampler(len(OWNERS), 3, seed=0), 0)
    with pytest.raises(TypeError, match=r"got 0. Call table.sample\(sampler, step\)"):
        table.sample(0, PoissonSampler(4, 3, seed=0))
    with pytest.raises(
        ValueError, match="must draw the 4 users of this table, got one of 4 examples"
    ):
        table.sample(PoissonSampler(4, 3, seed=0), 0)
    with pytest.raises(
        ValueError, match="`records_per_user` must be an integer of at least 1, got 0"
    ):
        UserTable(OWNERS, 0, seed=0)


def test_refuses_user_twice_in_a_batch():
    @dataclasses.dataclass(frozen=True)
    class WithReplacement(PoissonSampler):
        dp_event = None

        def sample(self, step):
            return Sample(np.array([2, 1, 2, 0]), np.array([True, True, True, False]))

    table = UserTable(OWNERS, 2, seed=0)
    with pytest.raises(ValueError, match="User 2 is 2 times in the batch"):
        table.sample(table.sampler(WithReplacement, batch_size=3, seed=0), 0)


@pytest.mark.parametrize("kind", [PoissonSampler, FixedSizeSampler, RandomAllocationSampler])
def test_epsilon_equals_that_of_sampling_users(kind):
    table = UserTable([place // 5 for place in range(500)], 5, seed=0)
    sampler = table.sampler(kind, batch_size=10, seed=0)
    tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=10, key=jax.random.key(0))
    state = after_releases(tx, jnp.zeros(2), 2)
    spent = accounting.guarantee(state, sampler).epsilon(1e-4)
    assert spent == planned_epsilon(
        noise_multiplier=2.0, steps=2, sampler=kind(100, 10, seed=3), delta=1e-4
    )
