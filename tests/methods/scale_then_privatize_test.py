"""Tests of scales that follow earlier releases: the algorithm, step by step, and its limits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from tests.helpers import floats, slow_but
from tests.oracles import problem
from tests.oracles import scale_then_privatize as oracle

STEPS, SIZE = 50, 6
OPTIONS = {
    "published": {"normalized": False},
    "normalized": {},
    "AdaCliP's power": {"power": 0.25},
    "delayed": {"every": 3},
    "noise taken off": {"stddev": 0.05, "every": 2},
}


def _run(options, each, shape, loss, clip_norm):
    """Returns our iterates with a noise stage, and its noise in the mapped space."""
    x0 = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    sigma = 0.3
    noise = dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=SIZE, key=jax.random.key(0))
    tx = optax.chain(
        noise,
        dpoptax.contrib.scale_then_privatize(each=each, b2=0.9, eps=0.2, **options),
        optax.adam(0.05, b2=0.95),
    )
    grad_fn = dpoptax.clipped_grad(loss, dpoptax.l2_clip(clip_norm))

    @jax.jit
    def draw(silent):
        nothing = dpoptax.extend.trust_clipped(jnp.zeros(shape), dpoptax.l2_clip(clip_norm))
        return noise.update(nothing, silent)

    silent, drawn = noise.init(x0), []
    for _ in range(STEPS):
        z, silent = draw(silent)
        drawn.append(np.asarray(z, np.float64))

    @jax.jit
    def step(params, state, batch):
        points = dpoptax.gradient_points(state, params)
        updates, state = tx.update(grad_fn(points, batch), state, params)
        return optax.apply_updates(params, updates), state

    batches = problem.batches(1, steps=STEPS, batch_size=SIZE)
    params, state, iterates = floats(x0), tx.init(floats(x0)), [x0]
    for batch in batches:
        params, state = step(params, state, problem.as_arrays(batch))
        iterates.append(np.asarray(params))
    return x0, batches, np.stack(iterates), drawn


@pytest.mark.parametrize("name", slow_but(("noise taken off",), OPTIONS))
def test_entry_scales_match_algorithm(name):
    options = OPTIONS[name]
    clip_norm = 3.0 if name == "published" else 0.5
    x0, batches, got, noise = _run(options, "entry", (8,), problem.loss_fn, clip_norm)
    options = dict(options)
    variance = options.pop("stddev", 0.0) ** 2
    want = oracle.scale_then_privatize(
        x0, batches, problem.gradient, eta=0.05, clip_norm=clip_norm, b1=0.9, b2=0.95,
        eps_adam=1e-8, noise=noise, eps=0.2, noise_variance=variance,
        **{"normalized": True} | options, scale_b2=0.9,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, atol=2e-3)


def _matrix_loss(x, example):
    return problem.loss_fn(jnp.array([1.0, -0.5]) @ x, example)


def _matrix_gradient(x, example):
    return np.outer([1.0, -0.5], problem.gradient(np.array([1.0, -0.5]) @ x, example))


@pytest.mark.slow
def test_side_scales_match_adafactor():
    x0, batches, got, noise = _run({}, "side", (2, 8), _matrix_loss, 0.5)
    want = oracle.scale_then_privatize(
        x0, batches, _matrix_gradient, eta=0.05, clip_norm=0.5, b1=0.9, b2=0.95, eps_adam=1e-8,
        noise=noise, eps=0.2, normalized=True, denominator=oracle.of_sides, scale_b2=0.9,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, atol=2e-3)


def _scales(tx, releases, params):
    state, update = tx.init(params), jax.jit(tx.update)
    for release in releases:
        updates, state = update(release, state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, release)  # they pass through unchanged
    ones = jax.tree.map(jnp.ones_like, params)
    return dpoptax.gradient_points(state, params).linear_map.forward(ones)


PARAMS = {"a": jnp.zeros((4, 6)), "b": jnp.zeros(6), "c": jnp.zeros((2, 3, 5))}


def _releases(seed, count, strengths):
    rng = np.random.default_rng(seed)
    return [
        {k: floats(strengths[k] * rng.normal(size=p.shape)) for k, p in PARAMS.items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("each", ["entry", "side", "leaf"])
def test_keeps_noise_power_and_bounds_scales(each):
    releases = _releases(0, 5, {"a": 1.0, "b": 1e-6, "c": 30.0})
    scales = jax.tree.leaves(
        _scales(dpoptax.contrib.scale_then_privatize(each=each), releases, PARAMS)
    )
    every = np.concatenate([np.ravel(s) for s in scales]).astype(np.float64)
    np.testing.assert_allclose(np.mean(every**-2), 1.0, rtol=1e-5)
    assert every.min() > 1e-3
    assert every.max() < (1.1 / 0.1) ** (3 if each == "side" else 1)


def _after_noisy_steps(tx, strengths, stddev):
    """Returns the final signal and scale of each layer, with the noise of a scaled step."""
    params = {k: jnp.zeros((20, 10)) for k in strengths}

    def step(state, key):
        keys = dict(zip(params, jax.random.split(key, (len(params), 2)), strict=True))
        signal = {k: s * jax.random.normal(keys[k][0], (20, 10)) for k, s in strengths.items()}
        noise = {k: stddev * jax.random.normal(keys[k][1], (20, 10)) for k in strengths}
        linear_map = dpoptax.gradient_points(state, params).linear_map
        release = jax.tree.map(jnp.add, signal, linear_map.returned(noise))
        return tx.update(release, state, params)[1], None

    keys = jax.random.split(jax.random.key(0), 400)
    state = jax.jit(lambda: jax.lax.scan(step, tx.init(params), keys)[0])()
    linear_map = dpoptax.gradient_points(state, params).linear_map
    scales = linear_map.forward(jax.tree.map(jnp.ones_like, params))
    return np.array([scales[k][0, 0] * s for k, s in strengths.items()])


@pytest.mark.slow
def test_known_noise_equalizes_layer_signals():
    strengths, stddev = {"a": 0.04, "b": 0.02, "c": 0.06}, 0.1
    options = {"each": "leaf", "eps": 1e-3, "b2": 0.99}
    equal = _after_noisy_steps(
        dpoptax.contrib.scale_then_privatize(stddev=stddev, **options), strengths, stddev
    )
    assert equal.max() < 1.25 * equal.min()
    # Without the noise level, the transform treats noise as signal.
    other = _after_noisy_steps(dpoptax.contrib.scale_then_privatize(**options), strengths, stddev)
    assert other.max() > 1.3 * other.min()


def test_zero_or_non_finite_releases_leave_scales_at_one():
    tx = dpoptax.contrib.scale_then_privatize()
    update = jax.jit(lambda release: tx.update(release, tx.init(PARAMS), PARAMS)[1])
    for value in (0.0, np.nan, np.inf):
        state = update(jax.tree.map(lambda p, v=value: floats(np.full(p.shape, v)), PARAMS))
        ones = jax.tree.map(jnp.ones_like, PARAMS)
        scales = dpoptax.gradient_points(state, PARAMS).linear_map.forward(ones)
        jax.tree.map(np.testing.assert_array_equal, scales, ones)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("each", "row"), ("b2", 1.0), ("eps", 0.0), ("eps", 9e-5), ("power", 0.0)),
        *(("power", 1.5), ("stddev", -1.0), ("every", 0)),
    ],
)
def test_refuses_numbers_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        dpoptax.contrib.scale_then_privatize(**{name: value})


def test_refuses_clipped_sum():
    tx = dpoptax.contrib.scale_then_privatize()
    with pytest.raises(TypeError, match="private"):
        tx.update(dpoptax.extend.trust_clipped(PARAMS, dpoptax.l2_clip(1.0)), tx.init(PARAMS))
