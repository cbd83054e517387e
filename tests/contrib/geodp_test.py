"""Tests of GeoDP: the published algorithm, its refutation, and the geometry with a proven bound."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax import accounting, sampling
from dpoptax._clipped_sum import clip_per_example
from dpoptax._random import box_muller
from dpoptax._release.ledger import replace_key
from dpoptax._rounding import bounds
from tests import helpers
from tests.oracles import geodp as oracle
from tests.oracles import problem

pytestmark = pytest.mark.usefixtures("no_room")

KEY = jax.random.key(3)
sum_clipped = jax.jit(clip_per_example.sum_clipped, static_argnums=0)


def make_sum(total, l2_clip_norm=1.0):
    return dpoptax.extend.trust_clipped(
        jnp.asarray(total, jnp.float32), dpoptax.l2_clip(l2_clip_norm)
    )


# The published algorithm.


@pytest.mark.slow
def test_geodp_matches_paper_for_fifty_steps():
    clip, beta, sigma, eta, size = 0.5, 0.3, 0.8, 0.2, problem.BATCH
    tx = optax.chain(
        dpoptax.contrib.geodp(beta, noise_multiplier=sigma, batch_size=size, key=KEY),
        optax.sgd(eta),
    )
    grad_fn = dpoptax.clipped_grad(problem.loss_fn, dpoptax.l2_clip(clip))
    expected, u, v, _ = problem.make(8)
    x = helpers.floats(expected)
    state = tx.init(x)

    @jax.jit
    def step(x, state, batch):
        clipped = grad_fn(dpoptax.gradient_points(state, x), batch)
        updates, state = tx.update(clipped, state, x)
        return optax.apply_updates(x, updates), state

    for t, batch in enumerate(zip(u, v, strict=True)):
        x, state = step(x, state, tuple(map(np.float32, batch)))
        noise = sigma * np.asarray(box_muller.normal(jax.random.fold_in(KEY, t), (8,)), np.float64)
        # Here angles are measured from the equator, so their noise has the opposite sign.
        noise[1:-1] *= -1
        gradients = [problem.gradient(expected, example) for example in zip(*batch, strict=True)]
        expected = oracle.geodp_step(
            expected, np.stack(gradients), clip_norm=clip, beta=beta, learning_rate=eta, noise=noise
        )
        np.testing.assert_allclose(x, expected, atol=1e-5)


def test_accountants_refuse_releases_of_geodp():
    tx = dpoptax.contrib.geodp(1.0, noise_multiplier=1.0, batch_size=8, key=KEY)
    state = tx.init(jnp.zeros(3))
    releases, update = [], jax.jit(tx.update)
    for _ in range(2):
        mean, state = update(make_sum([1.0, 2.0, 3.0]), state)
        releases.append(mean)
    (ledger,) = dpoptax.ledgers(state)
    assert ledger.releases == 2
    assert "not a mean" in ledger.mechanism.unproven
    assert not np.allclose(*releases)
    sampler = sampling.PoissonSampler(dataset_size=100, batch_size=10, seed=0)
    with pytest.raises(ValueError, match="without a privacy proof"):
        accounting.guarantee(state, sampler).epsilon(1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.5}, "1.5"),
        ({"beta": "1"}, "beta"),
        ({"noise_multiplier": -1}, "`noise_multiplier` must .* got -1"),
        ({"key": 0}, "`key` must be a random key, not a seed"),
    ],
)
def test_geodp_refuses_bad_arguments(changes, message):
    options = {"beta": 1.0, "noise_multiplier": 1, "batch_size": 1, "key": KEY}
    with pytest.raises((ValueError, TypeError), match=message):
        dpoptax.contrib.geodp(**options | changes)


@pytest.mark.parametrize(
    ("bound", "options", "message"),
    [
        (1.0, {}, "Exactly one"),
        (1.0, {"angle_norm": 1.0, "beta": 1.0}, "Exactly one"),
        (1.0, {"beta": 1.1}, "`beta` .* got 1.1"),
        (0.0, {"beta": 1.0}, "`l2_clip_norm` must .* got 0"),
        (1.0, {"angle_norm": -1.0}, "`angle_norm` must .* got -1"),
        (1.0, {"beta": 1.0, "magnitude_weight": 1.0}, "`magnitude_weight` must .* got 1"),
    ],
)
def test_hyperspherical_clip_refuses_bad_arguments(bound, options, message):
    with pytest.raises(ValueError, match=message):
        dpoptax.contrib.hyperspherical_clip(bound, **options)


def test_geodp_refuses_unsupported_updates():
    tx = dpoptax.contrib.geodp(1.0, noise_multiplier=1.0, batch_size=8, key=KEY)
    state = tx.init(None)
    with pytest.raises(TypeError, match="ClippedSum"):
        tx.update(jnp.ones(3), state)
    with pytest.raises(ValueError, match="at least 2 parameters"):
        tx.update(make_sum([1.0]), state)
    encoded = dpoptax.extend.trust_clipped(
        jnp.ones(3), dpoptax.contrib.hyperspherical_clip(1.0, beta=1.0)
    )
    with pytest.raises(TypeError, match="computes angles itself"):
        tx.update(encoded, state)


# The proven geometry.

CLIPS = {
    "l2": dpoptax.contrib.hyperspherical_clip(0.7, angle_norm=1.5),
    "narrow l2": dpoptax.contrib.hyperspherical_clip(0.7, angle_norm=0.01, magnitude_weight=0.9),
    "wide l2": dpoptax.contrib.hyperspherical_clip(1e6, angle_norm=100.0, magnitude_weight=1e-3),
    "box": dpoptax.contrib.hyperspherical_clip(0.7, beta=1.0),
    "small box": dpoptax.contrib.hyperspherical_clip(0.7, beta=0.05),
}


def extreme_gradients(d):
    """Returns gradients of every kind, (n, d); the bound must hold for each."""
    rng = np.random.default_rng(d)
    normal = rng.normal(size=(20, d))
    axes = np.eye(d)[[0, d - 2, d - 1]]
    rows = np.vstack(
        [
            normal,
            rng.standard_t(1, size=(20, d)),
            normal * (rng.uniform(size=(20, d)) < 0.3),
            *(scale * normal[:3] for scale in (1e-30, 1e-42, 1e30, 3e37)),
            *(sign * scale * axes for sign in (1, -1) for scale in (1e-30, 1.0, 3e38)),
            np.full((1, d), 3e38),
            np.zeros((1, d)),
            10.0 ** rng.uniform(-30, 30, size=(20, d)) * rng.choice([-1, 1], size=(20, d)),
        ]
    )
    return rows.astype(np.float32)


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("d", [50, pytest.param(3, marks=pytest.mark.slow), 2])
def test_every_encoding_has_norm_at_most_one(name, d):
    encode = jax.jit(lambda g: CLIPS[name].encode(g, None))
    norms = np.linalg.norm(np.asarray(encode(extreme_gradients(d)), np.float64), axis=-1)
    assert np.all(norms <= CLIPS[name].sensitivity * (1 + 1e-5))
    assert norms.max() > 0.01  # tiny where the bounds far exceed the angles


def test_factors_remove_rounding_above_bound():
    clip = CLIPS["l2"]
    np.testing.assert_array_equal(clip.factors(jnp.float32([0.5, 1.0, 2.0])), [1.0, 1.0, 0.5])


def test_zero_and_non_finite_gradients_add_exactly_zero():
    clip = CLIPS["l2"]
    rows = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    rows[3:] = -0.0
    rows[4, 2], rows[5, 0], rows[6, 4] = np.nan, np.inf, -np.inf
    good = np.arange(7) < 3
    summed = jax.jit(lambda mask: sum_clipped(clip, rows, mask))
    np.testing.assert_array_equal(summed(~good), 0)
    np.testing.assert_array_equal(summed(np.ones(7, bool)), summed(good))
    np.testing.assert_array_equal(sum_clipped(clip, np.zeros((0, 5), np.float32)), 0)


@pytest.mark.parametrize("name", CLIPS)
def test_encoding_matches_formula(name):
    clip, d = CLIPS[name], 6
    rng = np.random.default_rng(2)
    grads = 0.5 * rng.normal(size=(30, d))

    def elevations(g):
        theta = oracle.to_spherical(g)[1]
        return np.append(np.pi / 2 - theta[:-1], theta[-1])

    weight, expected = clip.magnitude_weight, np.zeros(d)
    for g in grads:
        offset = elevations(g)
        if clip.beta is None:
            radius = clip.angle_norm
            offset *= min(1, radius / np.linalg.norm(offset))
        else:
            half = np.append(np.full(d - 2, clip.beta * np.pi / 2), clip.beta * np.pi)
            radius = np.linalg.norm(half)
            offset = np.clip(offset, -half, half)
        magnitude = min(np.linalg.norm(g), clip.l2_clip_norm) / clip.l2_clip_norm
        expected += np.append(weight * magnitude, np.sqrt(1 - weight**2) * offset / radius)
    actual = sum_clipped(clip, helpers.floats(grads))
    # Clipped to slightly less, to leave room for the rounding of norms and factors.
    np.testing.assert_allclose(
        actual, expected, rtol=bounds.gamma(bounds.COEFFICIENT_ROUNDINGS), atol=2e-5
    )


def test_decoding_inverts_encoding():
    clip = dpoptax.contrib.hyperspherical_clip(5.0, angle_norm=10.0)
    grads = np.random.default_rng(4).normal(size=(3, 7)).astype(np.float32)
    encoded = jax.jit(lambda grads: clip.encode(grads, None))(grads)
    decode = jax.jit(lambda row: clip.decode(row, None))
    for row, gradient in zip(np.asarray(encoded), grads, strict=True):
        np.testing.assert_allclose(decode(row), gradient, atol=2e-5)


def test_long_gradients_decode_to_clip_norm():
    clip = dpoptax.contrib.hyperspherical_clip(0.5, beta=1.0)
    tx = dpoptax.clip_and_noise(clip, noise_multiplier=0.0, batch_size=1, key=KEY)
    params = jnp.zeros(2)
    mean, _ = jax.jit(tx.update)(jnp.array([[3.0, 4.0]]), tx.init(params), params)
    np.testing.assert_allclose(mean, [0.3, 0.4], rtol=1e-5)


def test_one_parameter_has_sign_and_no_angle():
    clip = dpoptax.contrib.hyperspherical_clip(0.5, beta=1.0)
    tx = dpoptax.clip_and_noise(clip, noise_multiplier=0.0, batch_size=2, key=KEY)
    params = jnp.zeros(1)
    mean, _ = jax.jit(tx.update)(jnp.array([[-3.0], [0.25]]), tx.init(params), params)
    np.testing.assert_allclose(mean, [(-0.5 + 0.25) / 2], rtol=1e-6)
    infinite = clip.encode(jnp.array([[-jnp.inf], [jnp.nan]]), None)
    assert not jnp.isfinite(infinite).any()


def test_noise_on_magnitude_and_angles_matches_docstring():
    clip = dpoptax.contrib.hyperspherical_clip(2.0, angle_norm=0.5, magnitude_weight=0.6)
    sigma, size = 0.01, 10
    tx = dpoptax.gaussian_noise(noise_multiplier=sigma, batch_size=size, key=KEY)
    state = tx.init(jnp.zeros(3))
    # Every example has magnitude 2 and elevation 0.1, so the mean is far from any edge.
    total = size * jnp.array([0.6, 0.8 * 0.1 / 0.5, 0.8 * -0.2 / 0.5])

    def release(key):
        return tx.update(dpoptax.extend.trust_clipped(total, clip), replace_key(state, key))[0]

    x = np.asarray(jax.jit(jax.vmap(release))(jax.random.split(KEY, 4000)), np.float64)
    norm = np.linalg.norm(x, axis=1)
    elevation, azimuth = np.arcsin(x[:, 0] / norm), np.arctan2(x[:, 2], x[:, 1])
    for values, mean, stddev in (
        (norm, 2.0, sigma * 2.0 / (0.6 * size)),
        (elevation, 0.1, sigma * 0.5 / (0.8 * size)),
        (azimuth, -0.2, sigma * 0.5 / (0.8 * size)),
    ):
        assert values.mean() == pytest.approx(mean, abs=5 * stddev / 60)
        assert values.std() == pytest.approx(stddev, rel=0.05)


def test_negative_magnitude_decodes_to_zero():
    clip = dpoptax.contrib.hyperspherical_clip(1.0, angle_norm=1.0)
    np.testing.assert_array_equal(clip.decode(jnp.array([-0.2, 0.1, 0.1]), None), 0.0)


def test_clipped_grad_equals_per_example_form():
    clip = CLIPS["l2"]
    params = helpers.mlp_params(0, (4, 3))
    batch = helpers.mlp_batch(0, 10, (4, 3))
    mask = np.arange(10) < 7
    grads = jax.jit(jax.vmap(jax.grad(helpers.mlp_loss), in_axes=(None, 0)))(params, batch)
    grads = jax.tree.map(lambda g: np.asarray(g)[:7], grads)
    expected = sum_clipped(clip, grads)
    for size in (None, 4):
        grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, clip, microbatch_size=size)
        clipped = jax.jit(grad_fn)(params, batch, mask)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), clipped.sum, expected
        )
