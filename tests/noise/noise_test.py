"""Tests the noise stage: distribution, fresh noise in every step, and the ledger's count."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._random import box_muller

CLIP = dpoptax.l2_clip(2.0)


def _release(params, *, steps=1, multiplier=1.5, batch_size=4, key=0, total=None):
    """Returns the releases of `steps` updates on a zero sum, and the last state."""
    tx = dpoptax.gaussian_noise(
        noise_multiplier=multiplier, batch_size=batch_size, key=jax.random.key(key)
    )
    total = jax.tree.map(jnp.zeros_like, params) if total is None else total
    state, releases = tx.init(params), []
    for _ in range(steps):
        mean, state = jax.jit(tx.update)(dpoptax.extend.trust_clipped(total, CLIP), state, params)
        releases.append(mean)
    return releases, state


def test_noise_is_added_before_dividing_by_batch_size():
    total = jnp.full(20_000, 8.0)
    (release,), _ = _release(total, total=total)
    assert abs(float(jnp.mean(release)) - 2.0) < 5 * 0.75 / 20_000**0.5


def test_draws_are_float32_under_bfloat16_parameters():
    params = jnp.zeros(50_000, jnp.bfloat16)
    total = jnp.zeros(50_000, jnp.bfloat16)
    tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=1, key=jax.random.key(0))
    state, update = tx.init(params), jax.jit(tx.update)
    mean, _ = update(dpoptax.extend.trust_clipped(total, CLIP), state)
    assert mean.dtype == jnp.float32
    assert len(np.unique(mean)) > 40_000  # bfloat16 normals have 128 distinct values
    mean, _ = jax.eval_shape(update, dpoptax.extend.trust_clipped(total, CLIP), state, params)
    assert mean.dtype == jnp.bfloat16


def test_empty_batch_still_releases_noise():
    grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(w * x), CLIP)
    params = jnp.zeros(100)
    batch = jnp.full((3, 100), jnp.nan)
    clipped = jax.jit(grad_fn)(dpoptax.gradient_points((), params), batch, jnp.zeros(3, bool))
    (release,), state = _release(params, total=clipped.sum)
    (nothing,), _ = _release(params)
    chex.assert_trees_all_equal(release, nothing)
    assert jnp.std(release) > 0.5
    assert dpoptax.ledgers(state)[0].releases == 1


def test_step_t_uses_the_key_folded_with_t():
    releases, _ = _release(jnp.zeros(3), steps=3, multiplier=1.0, batch_size=1)
    for t, release in enumerate(releases):
        key = jax.random.fold_in(jax.random.key(0), t)
        np.testing.assert_allclose(release, 2.0 * box_muller.normal(key, (3,)), rtol=1e-6)


def test_ledger_counts_releases_and_is_found_anywhere():
    tx = optax.chain(
        dpoptax.clip_and_noise(CLIP, noise_multiplier=1.5, batch_size=4, key=jax.random.key(0)),
        optax.adam(1e-3),
    )
    params = jnp.zeros(3)
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(5):
        _, state = update(jnp.ones((4, 3)), state, params)
    (ledger,) = dpoptax.ledgers({"anything": (state,)})
    assert ledger == (dpoptax.extend.Mechanism(noise_multiplier=1.5, batch_size=4), 5, "threefry")
    assert dpoptax.ledgers(optax.adam(1e-3).init(params)) == ()
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        dpoptax.ledgers(jax.vmap(lambda _: tx.init(params))(jnp.arange(2)))


def test_refuses_masking_the_noise():
    params = {"w": jnp.zeros(3), "v": jnp.zeros(2)}
    tx = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=1, key=jax.random.key(0))
    half = dpoptax.extend.trust_clipped({"w": jnp.zeros(3), "v": optax.MaskedNode()}, CLIP)
    with pytest.raises(TypeError, match="masked"):
        tx.update(half, tx.init(params))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "`noise_multiplier` must .* got -1"),
        ({"noise_multiplier": float("nan")}, ValueError, "`noise_multiplier` must .* got nan"),
        (
            {"noise_multiplier": jnp.ones(())},
            TypeError,
            "multiplier` must be a Python number",
        ),
        ({"batch_size": 0}, ValueError, "`batch_size` must .* got 0"),
        ({"batch_size": None}, TypeError, "`batch_size` must .* got None"),
        ({"key": 0}, TypeError, "`key` must be a random key, not a seed"),
        ({"key": None}, TypeError, "`key` must .* got None"),
    ],
)
def test_bad_arguments(change, error, message):
    good = {"noise_multiplier": 1.0, "batch_size": 8, "key": jax.random.key(0)}
    with pytest.raises(error, match=message):
        dpoptax.gaussian_noise(**{**good, **change})
    with pytest.raises(error, match=message):
        dpoptax.clip_and_noise(CLIP, **{**good, **change})


@pytest.mark.parametrize("fixed_point", [False, True])
def test_refuses_noise_that_would_flush_to_zero(fixed_point):
    clip = dpoptax.l2_clip(1e-12)
    total = dpoptax.extend.trust_clipped(jnp.array([1e-12, 0.0]), clip)
    tx = dpoptax.gaussian_noise(
        noise_multiplier=2.5e-19, batch_size=1, key=jax.random.key(0), fixed_point=fixed_point
    )
    with pytest.raises(ValueError, match=r"got 2\.5e-19 \* .*1e-12.*flushed to zero"):
        tx.update(total, tx.init(jnp.zeros(2)))


@pytest.mark.parametrize("adaptive", [False, True])
def test_sum_has_no_derivative(adaptive):
    """Noise is a constant, so the derivative would be that of the clipped sum, which is private."""
    stage = {"noise_multiplier": 1e3, "batch_size": 4, "key": jax.random.key(0)}
    clip = dpoptax.contrib.adaptive_clip(1.0) if adaptive else dpoptax.l2_clip(1.0)
    noise = (
        dpoptax.contrib.adaptive_gaussian_noise(clip, **stage)
        if adaptive
        else dpoptax.gaussian_noise(**stage)
    )
    grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(jnp.tanh(p * x)), clip)
    batch = jax.random.normal(jax.random.key(1), (4, 3))

    @jax.jit
    def released(params):
        state = noise.init(params)
        grads = grad_fn(dpoptax.gradient_points(state, params), batch, jnp.ones(4, bool))
        return noise.update(grads, state, params)[0]

    release, derivative = jax.jvp(released, (jnp.ones(3),), (jnp.ones(3),))
    assert not derivative.any()
    np.testing.assert_array_equal(release, released(jnp.ones(3)))
    assert not jax.vjp(released, jnp.ones(3))[1](jnp.ones(3))[0].any()
