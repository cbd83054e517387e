"""Tests of LP-Adam, DP-AdamBC and GaLore: pseudo-code, limits of Adam, and known noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from tests.oracles import lp_adam as oracle

pytestmark = pytest.mark.usefixtures("no_room")

STEPS, BATCH, SHAPE, ETA, CLIP = 50, 4, (5, 3), 0.05, 0.8
FILTER = dpoptax.filters.preset("doppler-second-order")


def _loss(x, example):
    """A smooth non-convex loss of a matrix x: tanh regression with a ripple."""
    u, v = example
    return 0.5 * jnp.sum((jnp.tanh(u @ x) - v) ** 2) + 0.1 * jnp.sum(jnp.cos(2.0 * x))


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    u = rng.normal(size=(STEPS, BATCH, SHAPE[0]))
    v = rng.normal(size=(STEPS, BATCH, SHAPE[1]))
    return rng.normal(size=SHAPE), u, v, 0.05 * rng.normal(size=(STEPS, *SHAPE))


def _run(problem, optimizer):
    """Returns x_0 … x_T with the given noise added to the mean clipped gradient."""
    x0, u, v, noise = problem
    grad_fn = dpoptax.clipped_grad(_loss, dpoptax.l2_clip(CLIP))

    def step(carry, inputs):
        x, state = carry
        batch, w = inputs
        mean = grad_fn(dpoptax.gradient_points(state, x), batch).sum / BATCH + w
        updates, state = optimizer.update(mean, state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), x

    with jax.enable_x64(True):
        x0 = jnp.asarray(x0)
        inputs = jax.tree.map(jnp.asarray, ((u, v), noise))
        _, xs = jax.lax.scan(step, (x0, optimizer.init(x0)), inputs)
        return np.concatenate([x0[None], xs])


def _oracle(problem, **arguments):
    x0, u, v, noise = problem
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(_loss))
        batches = [[(u[t, i], v[t, i]) for i in range(BATCH)] for t in range(STEPS)]
        return oracle.lp_adam(
            x0,
            batches,
            lambda x, e: np.asarray(gradient(x, e)),
            eta=ETA,
            clip_norm=CLIP,
            noise=noise,
            **arguments,
        )


def _same(got, want):
    assert np.abs(np.diff(want, axis=0)).max() > 1e-2
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stddev"),
    [
        pytest.param(name, stddev, marks=[pytest.mark.slow] * (name != "momentum" or not stddev))
        for name in ("none", "momentum", "doppler-second-order")
        for stddev in (0.0, 0.05)
    ],
)
def test_lp_adam_matches_algorithm_3(problem, name, stddev):
    filt = dpoptax.filters.preset(name)
    want = _oracle(problem, b=filt.b, a=filt.a, beta=0.1, eps=0.02, noise_variance=stddev**2)
    _same(_run(problem, dpoptax.lp_adam(ETA, *filt, b2=0.9, eps=0.02, stddev=stddev)), want)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [STEPS, 10])
def test_lp_adam_works_inside_galore(problem, interval):
    want = _oracle(problem, b=FILTER.b, a=FILTER.a, beta=0.1, eps=0.02, rank=2, interval=interval)
    optimizer = optax.chain(
        optax.contrib.scale_by_galore(
            2, interval, base_optimizer=dpoptax.extend.scale_by_lp_adam(*FILTER, b2=0.9, eps=0.02)
        ),
        optax.scale_by_learning_rate(ETA),
    )
    _same(_run(problem, optimizer), want)
    params = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}
    state = optimizer.init(params)[0].base_optimizer_state
    assert state.nu["w"].shape == state.filtered.buffers[0]["w"].shape == (2, 3)
    assert state.nu["b"].shape == (3,)


@pytest.mark.slow
def test_adam_bc_without_noise_is_adam(problem):
    ours = _run(problem, dpoptax.contrib.adam_bc(ETA, stddev=0.0))
    _same(ours, _run(problem, optax.adam(ETA, eps=1e-12)))


def test_bfloat16_parameters_have_float32_second_moment():
    tx = dpoptax.extend.scale_by_lp_adam(*FILTER)
    params = jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    for _ in range(3):
        out, state = tx.update(params, state, params)
    assert out.dtype == jnp.bfloat16
    assert state.nu.dtype == jnp.float32
    np.testing.assert_allclose(state.nu, 1 - 0.999**3, rtol=1e-5)


def test_noise_stddev_matches_release():
    clip = dpoptax.per_layer_clip([3.0, 4.0])
    stddev = dpoptax.extend.noise_stddev(clip, noise_multiplier=2.0, batch_size=50)
    assert stddev == 0.2
    tx = dpoptax.clip_and_noise(clip, noise_multiplier=2.0, batch_size=50, key=jax.random.key(0))
    params = [np.zeros(20_000, np.float32), np.zeros(1, np.float32)]
    release, _ = jax.jit(tx.update)(
        [p[None] for p in params], tx.init(params), params, mask=np.ones(1, bool)
    )
    np.testing.assert_allclose(np.std(release[0]), stddev, rtol=0.03)
    for encoding in (
        dpoptax.contrib.adaptive_clip(0.1),
        dpoptax.contrib.hyperspherical_clip(1.0, beta=0.5),
    ):
        with pytest.raises(ValueError, match="must not decode the noisy mean"):
            dpoptax.extend.noise_stddev(encoding, noise_multiplier=2.0, batch_size=50)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpoptax.extend.scale_by_lp_adam([1.0], b2=1.0), "`b2` must .* got 1"),
        (lambda: dpoptax.extend.scale_by_lp_adam([1.0], eps=0.0), "`eps` must .* got 0"),
        (lambda: dpoptax.extend.scale_by_lp_adam([1.0], stddev=-0.1), "`stddev` must .* got -0.1"),
        (lambda: dpoptax.extend.scale_by_lp_adam([0.5]), "gain"),
        (lambda: dpoptax.contrib.adam_bc(0.1, stddev=0.1, b1=1.0), "`b1` must .* got 1"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
