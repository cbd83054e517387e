"""Tests correlated noise in integers: the recursion, and the effect of one example."""

import dataclasses
import fractions
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting, matrix, sampling
from dpoptax._release import correlated_fixed_point as fixed
from dpoptax._release import fixed_point
from dpoptax._release.fixed_point import stddev_in_steps

KEY = jax.random.key(0)
CLIP = dpoptax.l2_clip(0.5)
STRATEGIES = {
    "given": matrix.BandedToeplitz((1.0, 0.5, 0.375)),
    "optimal": matrix.BandedToeplitz((0.6733, 0.4857, 0.4206, 0.3659)),
    "negative": matrix.BandedToeplitz((1.0, -0.7, 0.1)),
}
RELEASE = {"noise_multiplier": 1.5, "batch_size": 8.0}


def noise(strategy, **changes):
    arguments = {**RELEASE, "key": KEY, "fixed_point_clip": CLIP, **changes}
    return dpoptax.correlated_noise(strategy, **arguments)


def rounded(numerator):
    """Rounds numerator/2¹¹ to the nearest integer, halves up, for a Python integer."""
    return math.floor(fractions.Fraction(numerator, 2**11) + fractions.Fraction(1, 2))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("extreme", [False, True])
def test_releases_follow_the_integer_recursion(strategy, extreme, monkeypatch):
    """Releases match exactly, even if all numbers are as extreme as their distribution allows."""
    step = dpoptax.extend.fixed_point_grid(CLIP, **RELEASE)
    drawn, rng = [], np.random.default_rng(0)

    def draw(key, shape, stddev, *, leaf=0, out_sharding=None):
        del key, leaf, out_sharding
        size = 17 * stddev if extreme else stddev
        numbers = rng.choice([-1, 1], shape) if extreme else rng.normal(size=shape)
        drawn.append(np.rint(size * numbers).astype(np.int32))
        return jnp.asarray(drawn[-1])

    monkeypatch.setattr(fixed_point, "discrete_gaussian", draw)
    tx, params = noise(strategy), jnp.zeros(50)
    sums = rng.normal(size=(12, 50)).astype(np.float32)
    state, past = tx.init(params), [[0] * 50] * 12
    first, *others = strategy.coefficients
    taps = [round(2048 * c / first) for c in others]
    for total in sums:
        mean, state = tx.update(dpoptax.extend.trust_clipped(jnp.asarray(total), CLIP), state)
        now = [
            int(n) - rounded(sum(k * y[i] for k, y in zip(taps, past, strict=False)))
            for i, n in enumerate(drawn[-1])
        ]
        past = [now, *past]
        want = [round(float(s) / step) + y for s, y in zip(total, now, strict=True)]
        np.testing.assert_array_equal(mean, np.float32(want) * np.float32(step) / 8)
    if extreme:  # without correlation the numbers would be less extreme
        assert max(map(abs, past[0])) > 17 * stddev_in_steps(1.5 * 0.5, step)


def test_product_is_exact_for_all_int32():
    rng = np.random.default_rng(1)
    for taps in ((1477, 1279, 1113), (2047, -1), (-1536, 512, 3, 0, -2048), (1,)):
        ends = rng.choice([-(2**31), 2**31 - 1, -1, 0, 1, 2**11 - 1, -(2**11)], (len(taps), 100))
        inner = rng.integers(-(2**31), 2**31, (len(taps), 300))
        past = np.concatenate([ends, inner], 1).astype(np.int32)
        got = fixed.product(taps, list(jnp.asarray(past)))
        for i, column in enumerate(past.T.tolist()):
            want = rounded(sum(k * y for k, y in zip(taps, column, strict=True)))
            if -(2**31) <= want < 2**31:
                assert int(got[i]) == want


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_example_moves_noise_within_hidden_sensitivity(strategy):
    """Searches for differences Δ of the sum and fractions φ of the other steps' products.

    An adversary who assumes that the example is absent computes y + Δ instead of y for the noise of
    its step. That noise is off by Δ. In the other steps of the band, the inputs of the recursion
    are off by round(φ + cΔ) − round(φ). More than half of the allowed room is used.
    """
    taps, d = fixed.multiples(strategy), 400
    # Fractions just above or just below an integer, in as many steps as possible.
    deltas, fractions = np.arange(1, 2**14), np.arange(2048)
    off = np.array([k * deltas % 2048 for k in taps]) / 2048
    worst = deltas[np.argmax(np.sum(np.where(off, np.maximum(1 - off, off), 0) ** 2, 0))]
    moved = [d * worst.astype(float) ** 2]
    for k in taps:
        here, there = (
            np.asarray(
                fixed.product((k, 1), [jnp.full(2048, y, jnp.int32), jnp.asarray(fractions)])
            )
            for y in (0, worst)
        )
        assert np.abs(there - here - k * worst / 2048).max() < 1
        moved.append(d * float(np.max(np.abs(there - here))) ** 2)
    found = math.sqrt(sum(moved))
    g = 0.5 / (math.sqrt(d) * (worst - 1))  # so Δ is the largest that C = 0.5 and rounding allow
    total = dpoptax.extend.trust_clipped(jnp.zeros(d), CLIP)
    room = fixed.stddev_of_band(strategy, total, 1.0, g) / g
    proportional = math.hypot(1, *(k / 2048 for k in taps)) * math.sqrt(d) * worst
    assert proportional < found <= room
    rounding = math.sqrt(len(taps) * d)
    assert room == pytest.approx(proportional + rounding)
    assert np.sum(np.where(off, np.maximum(1 - off, off), 0) ** 2, 0).max() > 0.5 * len(taps)


def test_noise_has_covariance_of_the_strategy():
    strategy = STRATEGIES["optimal"]
    tx, params = noise(strategy), {"a": jnp.zeros((40, 30)), "b": jnp.zeros(800)}
    total = dpoptax.extend.trust_clipped(params, CLIP)

    def step(state, _):
        mean, state = tx.update(total, state, params)
        return state, mean

    state, means = jax.jit(lambda s: jax.lax.scan(step, s, length=150))(tx.init(params))
    y = np.concatenate([np.reshape(m, (150, -1)) for m in jax.tree.leaves(means)], 1)
    y = np.asarray(y, np.float64) * RELEASE["batch_size"]
    c = np.array(strategy.coefficients)
    white = sum(c_i * np.roll(y, i, 0) for i, c_i in enumerate(c))[4:]
    assert np.std(white) == pytest.approx(1.5 * 0.5, rel=5e-3)
    assert np.abs(np.mean(white[1:] * white[:-1])) < 4 * (1.5 * 0.5) ** 2 / math.sqrt(white.size)
    (ledger,) = dpoptax.ledgers(state)
    assert ledger.mechanism.fixed_point
    assert ledger.mechanism.sensitivity == 0.5


def test_integer_sums_get_the_same_noise():
    step = dpoptax.extend.fixed_point_grid(CLIP, **RELEASE)
    loss = lambda params, example: jnp.vdot(params, example)  # noqa: E731
    batch = jax.random.normal(KEY, (8, 5))
    tx, params = noise(STRATEGIES["given"]), jnp.zeros(5)
    mask = jnp.ones(8, bool)
    points = dpoptax.gradient_points((), params)

    @functools.partial(jax.jit, static_argnums=0)
    def mean(grid):
        clipped = dpoptax.clipped_grad(loss, CLIP, grid=grid)(points, batch, mask)
        return tx.update(clipped, tx.init(params))[0]

    np.testing.assert_allclose(mean(None), mean(step), atol=16 * step / 8)
    with pytest.raises(ValueError, match="the grid that .dpoptax.extend.fixed_point_grid. returns"):
        mean(2 * step)


def test_price_equals_floating_point_noise():
    sampler = matrix.CyclicPoissonSampler(1000, 8, seed=0, cycle_length=4)
    total, spent = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP), []
    for clip in (None, CLIP):
        tx = noise(STRATEGIES["optimal"], fixed_point_clip=clip)
        update, state = jax.jit(tx.update), tx.init(jnp.zeros(3))
        for _ in range(9):
            _, state = update(total, state)
        spent.append(accounting.guarantee(state, sampler).epsilon(1e-5))
    assert spent[0] == spent[1]


@pytest.mark.parametrize(
    "sampler",
    [
        matrix.CyclicPoissonSampler(24, 8, seed=0, cycle_length=3),
        sampling.RandomAllocationSampler(1000, 8, seed=0),
    ],
)
def test_refuses_epsilon_if_example_repeats_within_band(sampler):
    states = []
    for clip in (None, CLIP):
        tx = noise(STRATEGIES["optimal"], fixed_point_clip=clip)
        total = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP)
        states.append(jax.jit(tx.update)(total, tx.init(jnp.zeros(3)))[1])
    accounting.guarantee(states[0], sampler).epsilon(1e-5)
    with pytest.raises(ValueError, match="`cycle_length` is at least the number of bands"):
        accounting.guarantee(states[1], sampler).epsilon(1e-5)


def test_refuses_strategy_that_is_not_banded():
    with pytest.raises(TypeError, match="must be a `dpoptax.matrix.BandedToeplitz`"):
        noise(matrix.BufferedToeplitz((0.9, 0.3), (0.2, 0.3), steps=24))


def test_refuses_sum_of_another_clip():
    tx = noise(STRATEGIES["given"])
    total = dpoptax.extend.trust_clipped(jnp.zeros(3), dpoptax.l2_clip(1.0))
    with pytest.raises(TypeError, match="the same clip to both"):
        tx.update(total, tx.init(jnp.zeros(3)))


def test_refuses_state_of_another_clip_or_kind():
    total = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP)
    stage = noise(STRATEGIES["given"])
    for clip in (None, dpoptax.l2_clip(1.0)):
        state = noise(STRATEGIES["given"], fixed_point_clip=clip).init(jnp.zeros(3))
        with pytest.raises(ValueError, match="The state was made for"):
            stage.update(total, state)
        # As after restoring a checkpoint: arrays from one state, static fields from the other.
        own = stage.init(jnp.zeros(3))
        mixed = dataclasses.replace(own, imprint=state.imprint)
        mean, _ = stage.update(total, mixed)
        assert np.isnan(mean).all()


def test_refuses_cast_buffers():
    tx = noise(STRATEGIES["given"])
    state = tx.init(jnp.zeros(3))
    cast = dataclasses.replace(state, buffers=optax.tree.cast(state.buffers, jnp.float32))
    with pytest.raises(ValueError, match="must be int32, got float32. The state was cast"):
        tx.update(dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP), cast)


@pytest.mark.parametrize("coefficients", [(1.0, -0.999), (1.0, 0.9995)])
def test_refuses_noise_that_may_overflow_int32(coefficients):
    tx = noise(matrix.BandedToeplitz(coefficients))
    total = dpoptax.extend.trust_clipped(jnp.zeros(3), CLIP)
    with pytest.raises(ValueError, match="accumulates the noise of more than"):
        tx.update(total, tx.init(jnp.zeros(3)))


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_bound_on_inverse_sum_is_tight(strategy):
    taps = fixed.multiples(strategy)
    h = [1.0]
    for _ in range(2000):
        h.append(-sum(k / 2048 * x for k, x in zip(taps, reversed(h), strict=False)))
    bound = fixed._sum_of_inverse(taps)
    assert math.fsum(map(abs, h)) <= bound * (1 + 1e-12)
    assert bound < 1.01 * math.fsum(map(abs, h))


def test_zero_noise_releases_the_sum():
    tx = noise(STRATEGIES["given"], noise_multiplier=0.0)
    mean, _ = tx.update(dpoptax.extend.trust_clipped(jnp.full(3, 0.7), CLIP), tx.init(jnp.zeros(3)))
    np.testing.assert_array_equal(mean, np.float32(0.7) / 8)


def test_one_band_equals_fixed_point_noise():
    total = dpoptax.extend.trust_clipped(jnp.full(7, 0.3), CLIP)
    one = noise(matrix.BandedToeplitz((1.0,)))
    other = dpoptax.gaussian_noise(**RELEASE, key=KEY, fixed_point=True)
    means = [jax.jit(tx.update)(total, tx.init(jnp.zeros(7)))[0] for tx in (one, other)]
    np.testing.assert_array_equal(*means)
