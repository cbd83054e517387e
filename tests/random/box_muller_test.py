"""Tests of Gaussian noise by the Box–Muller method from both words of each hash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import random as jex_random
from scipy import stats

import dpoptax
from dpoptax._random import box_muller
from dpoptax._release import ledger

pytestmark = pytest.mark.optimized

CLIP = dpoptax.l2_clip(2.0)
SHAPES = [(9001,), (3, 3, 5, 8), (3, 5, 7)]


def noise(**kwargs):
    arguments = {"noise_multiplier": 1.5, "batch_size": 4, "key": jax.random.key(0)}
    return dpoptax.gaussian_noise(**{**arguments, **kwargs})


def same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    return np.asarray(actual).tobytes() == np.asarray(expected).tobytes()


def transcribed(key, size):
    """Computes Box and Muller (1958) in float64, on the words of JAX's threefry-2x32."""
    half = -(-size // 2)
    counters = np.concatenate([np.ones(half, np.uint32), np.arange(half, dtype=np.uint32)])
    words = jex_random.threefry_2x32(jax.random.key_data(key), jnp.asarray(counters))
    first, last = np.asarray(words).astype(np.int64).reshape(2, -1)
    within = (last & (2**30 - 1)) ^ 2**29  # in the quadrant: 30 bits with a sign, from −2²⁹ on
    angle = np.pi / 2 * within / 2**30
    x = radius(first, last) * np.cos(angle) * np.where(last >> 31, -1, 1)
    y = radius(first, last) * np.sin(angle) * np.where(last >> 30 & 1, -1, 1)
    return np.concatenate([x, y])[:size]


def radius(first, last):
    spread = ((last * box_muller._SPREAD % 2**32) // 2**9 + 0.5) / 2**23
    u = ((first % 2**31).astype(np.float32) + spread.astype(np.float32)) / np.float64(2**32)
    return np.sqrt(-2 * np.where(first >> 31, np.log1p(-u), np.log(u)))


def test_radii_are_precise_near_zero_and_in_the_tail():
    rng = np.random.default_rng(0)
    places = np.array([0, 0.25, 1 - 0.5**0.5, 0.5, 0.5, 0.75, 1.5 - 0.5**0.5, 1]) * 2**32
    first = np.clip(places[:, None].astype(np.int64) + np.arange(-999, 999), 0, 2**32 - 1).ravel()
    last = rng.integers(0, 2**32, first.size)
    words = (jnp.asarray(w.astype(np.uint32)) for w in (first, last))
    found = np.sqrt(2) * np.asarray(jax.jit(box_muller._polar)(*words)[0], np.float64)
    np.testing.assert_allclose(found, radius(first, last), rtol=3e-7)
    assert found.min() < 1e-4
    assert found.max() > 6.6


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize("seed", [0, 2**31 - 1])
def test_values_match_the_formula(size, seed):
    key = jax.random.fold_in(jax.random.key(seed), size)
    drawn = box_muller.normal(key, (size,))
    np.testing.assert_allclose(drawn, transcribed(key, size), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_depend_only_on_key_and_shape(shape):
    """Draws agree eagerly, in larger programs, under vmap and in loops."""
    keys = jax.random.split(jax.random.key(3), 2)
    draw = lambda key: box_muller.normal(key, shape)  # noqa: E731
    want = [draw(key) for key in keys]
    assert len(np.unique(np.abs(np.stack(want)))) > 1.999 * want[0].size  # hardly any repeats
    assert same_bits(jax.jit(lambda k: 2 * draw(k) + 1)(keys[0]), 2 * want[0] + 1)
    for stacked in (jax.jit(jax.vmap(draw))(keys), jax.jit(lambda k: jax.lax.map(draw, k))(keys)):
        assert same_bits(stacked, jnp.stack(want))


@pytest.mark.parametrize("shape", [(), (0,), (5, 0, 2), (1,)], ids=str)
def test_small_shapes(shape):
    drawn = box_muller.normal(jax.random.key(3), shape)
    assert drawn.shape == shape
    assert np.isfinite(drawn).all()


def test_numbers_of_a_pair_are_independent():
    half = 500_000
    x, y = np.asarray(box_muller.normal(jax.random.key(5), (2 * half,)), float).reshape(2, -1)
    angle, radius = np.arctan2(y, x) / np.pi, x**2 + y**2
    assert stats.kstest(angle, stats.uniform(-1, 2).cdf).pvalue > 1e-3
    assert stats.kstest(radius / 2, "expon").pvalue > 1e-3
    limit = 5 / half**0.5
    pairs = [(x, y), (x**2, y**2), (x, y**2), (angle, radius), (np.abs(x), np.abs(y))]
    pairs += [(x[1:], y[:-1]), (x[:-1], y[1:]), (x[1:], x[:-1]), (y[1:] ** 2, y[:-1] ** 2)]
    for i, (a, b) in enumerate(pairs):
        assert abs(np.corrcoef(a, b)[0, 1]) < limit, i
    within = stats.kstest((x + 0.02 * y**2)[:200_000], "norm").pvalue
    assert within < 1e-6, "the test would miss a dependence between the two"


def test_noise_is_independent_of_other_draws():
    """JAX's draws have separate counters, because the two words of a hash are dependent."""
    zeros = {"a": jnp.zeros(20_000), "b": jnp.zeros(20_000)}
    step_keys = [jax.random.fold_in(jax.random.key(0), step) for step in range(2)]
    leaf_keys = [key for step_key in step_keys for key in jax.random.split(step_key, 2)]
    draws = [jax.random.normal(key, (20_000,)) for key in leaf_keys]
    for tx in (noise(), noise(key=jax.random.key(1)), noise(fixed_point=True)):
        state = tx.init(zeros)
        for _ in range(2):
            mean, state = jax.jit(tx.update)(dpoptax.extend.trust_clipped(zeros, CLIP), state)
            draws += [mean["a"], mean["b"]]
    for power in (1, 2):
        correlation = np.corrcoef(np.stack(draws) ** power) - np.eye(len(draws))
        assert np.abs(correlation).max() < 5 / 20_000**0.5


def test_refuses_other_generators_and_large_shapes():
    for fixed_point in (False, True):
        with pytest.raises(TypeError, match="must be a threefry key, got one of 'rbg'"):
            noise(key=jax.random.key(0, impl="rbg"), fixed_point=fixed_point)
    with pytest.raises(ValueError, match="at most 2³² numbers"):
        jax.eval_shape(lambda key: box_muller.normal(key, (2**16, 2**16 + 1)), jax.random.key(0))


def test_float64_noise_has_all_bits_of_float64():
    with jax.enable_x64(True):
        total = jnp.zeros(20_000, jnp.float64)
        mean, _ = noise().update(dpoptax.extend.trust_clipped(total, CLIP), noise().init(total))
        mean = np.asarray(mean)
    assert mean.dtype == np.float64
    assert (mean.astype(np.float32) != mean).mean() > 0.99
    assert stats.kstest(mean / (1.5 * 2.0 / 4), "norm").pvalue > 1e-3


def test_refuses_run_started_with_other_noise(monkeypatch):
    """A resumed run must repeat a step with the noise that the step had."""
    zeros = jnp.zeros(3)
    with monkeypatch.context() as before:
        before.setitem(ledger._DRAWN, False, "otherwise")
        state = noise().init(zeros)
    mean, after = noise().update(dpoptax.extend.trust_clipped(zeros, CLIP), state)
    assert np.isnan(mean).all()
    with pytest.raises(ValueError, match="belong to another mechanism"):
        dpoptax.ledgers(after)
