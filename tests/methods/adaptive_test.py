"""Tests of LP-Adam, DP-AdamBC and GaLore: pseudo-code, limits of Adam, and known noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from tests.oracles import problem
from tests.oracles.lp_adam import lp_adam

pytestmark = pytest.mark.usefixtures("no_room")

ETA, PROBLEM = 0.05, problem.make(5, 3)
FILTER = dpoptax.filters.preset("doppler-second-order")


def _assert_same(optimizer, **arguments):
    want = PROBLEM.solve(lp_adam, eta=ETA, clip_norm=problem.CLIP, noise=PROBLEM.noise, **arguments)
    problem.assert_same(PROBLEM.run(optimizer), want, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "stddev"),
    [
        pytest.param(name, stddev, marks=[pytest.mark.slow] * (name != "momentum" or not stddev))
        for name in ("none", "momentum", "doppler-second-order")
        for stddev in (0.0, 0.05)
    ],
)
def test_lp_adam_matches_algorithm_3(name, stddev):
    b, a = dpoptax.filters.preset(name)
    optimizer = dpoptax.lp_adam(ETA, b, a, b2=0.9, eps=0.02, stddev=stddev)
    _assert_same(optimizer, b=b, a=a, beta=0.1, eps=0.02, noise_variance=stddev**2)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [problem.STEPS, 10])
def test_lp_adam_works_inside_galore(interval):
    optimizer = optax.chain(
        optax.contrib.scale_by_galore(
            2, interval, base_optimizer=dpoptax.extend.scale_by_lp_adam(*FILTER, b2=0.9, eps=0.02)
        ),
        optax.scale_by_learning_rate(ETA),
    )
    low_rank = {"rank": 2, "interval": interval}
    _assert_same(optimizer, b=FILTER.b, a=FILTER.a, beta=0.1, eps=0.02, **low_rank)
    params = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(3)}
    state = optimizer.init(params)[0].base_optimizer_state
    assert state.nu["w"].shape == state.filtered.buffers[0]["w"].shape == (2, 3)
    assert state.nu["b"].shape == (3,)


@pytest.mark.slow
def test_adam_bc_without_noise_is_adam():
    ours = PROBLEM.run(dpoptax.contrib.adam_bc(ETA, stddev=0.0))
    problem.assert_same(ours, PROBLEM.run(optax.adam(ETA, eps=1e-12)), atol=1e-5)


def test_bfloat16_parameters_have_float32_second_moment():
    tx = dpoptax.extend.scale_by_lp_adam(*FILTER)
    params = jnp.ones(2, jnp.bfloat16)
    state = tx.init(params)
    for _ in range(3):
        out, state = tx.update(params, state, params)
    assert out.dtype == jnp.bfloat16
    assert state.nu.dtype == jnp.float32
    np.testing.assert_allclose(state.nu, 1 - 0.999**3, rtol=1e-5)


def test_default_floor_is_the_root_of_the_deviation_of_v():
    """Var v̂ = 2 s⁴ (1 − β)/(1 + β), the variance of an average of s² χ²(1) with decay β."""
    stddev, b2, noise = 0.3, 0.9, np.random.default_rng(0)
    tx = dpoptax.extend.scale_by_lp_adam(b=[1.0], a=[], b2=b2, stddev=stddev)
    weights = (1 - b2) * b2 ** np.arange(200)
    squares = np.square(noise.normal(0, stddev, (20_000, 200)))
    gradient = np.float32(1e-3)  # v̂ is below s², so the floor divides
    update, _ = tx.update(gradient, tx.init(gradient))
    assert 1e-3 / update == pytest.approx(np.std(squares @ weights) ** 0.5, rel=0.01)


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
