"""Tests adaptive clipping: the threshold and its quantile, and the cost of a release."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from dpoptax._points.points import ReferenceState
from tests import helpers
from tests.ghost_clipping import comparison
from tests.networks import NETWORKS

pytestmark = pytest.mark.usefixtures("no_room")

KEY = jax.random.key(0)


def _stage(clip, *, noise_multiplier=0.0, batch_size=8, key=KEY):
    return dpoptax.contrib.adaptive_gaussian_noise(
        clip, noise_multiplier=noise_multiplier, batch_size=batch_size, key=key
    )


def _sum(clip, grads, threshold, mask=None):
    reference = jnp.asarray(threshold, jnp.float32)
    return dpoptax.extend.trust_clipped(sum_clipped(clip, grads, mask, reference), clip, reference)


def andrew(gradients, *, threshold, quantile, learning_rate):
    """Returns means and thresholds of Andrew et al. 2021, Algorithm 1, without noise."""
    means, thresholds = [], [threshold]
    for batch in gradients:
        norms = np.linalg.norm(batch, axis=1)
        clipped = batch * np.minimum(1.0, threshold / norms)[:, None]
        share = np.mean(norms <= threshold)  # b̃^t
        means.append(clipped.mean(axis=0))
        threshold = threshold * np.exp(-learning_rate * (share - quantile))
        thresholds.append(threshold)
    return np.array(means), np.array(thresholds)


def test_follows_the_published_algorithm():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(50, 8, 5)) * rng.lognormal(size=(50, 8, 1))
    want, thresholds = andrew(gradients, threshold=0.1, quantile=0.7, learning_rate=0.2)
    clip = dpoptax.contrib.adaptive_clip(0.1, quantile=0.7, learning_rate=0.2, count_share=0.03)
    tx = _stage(clip)
    state = tx.init(jnp.zeros(5))

    @jax.jit
    def step(state, grads):
        return tx.update(_sum(clip, grads, state.threshold.reference), state)

    for t, batch in enumerate(gradients):
        np.testing.assert_allclose(state.threshold.reference, thresholds[t], rtol=1e-5)
        mean, state = step(state, jnp.asarray(batch, jnp.float32))
        np.testing.assert_allclose(mean, want[t], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("quantile", "start"),
    [
        (0.2, 1e-4),
        pytest.param(0.5, 1e4, marks=pytest.mark.slow),
        pytest.param(0.9, 1e4, marks=pytest.mark.slow),
    ],
)
def test_threshold_reaches_quantile_from_any_start(quantile, start):
    norms = np.random.default_rng(1).lognormal(size=400)
    grads = jnp.asarray(norms[:, None] * [0.6, 0.8], jnp.float32)
    clip = dpoptax.contrib.adaptive_clip(start, quantile=quantile)
    tx = _stage(clip, noise_multiplier=1.0, batch_size=400)

    def step(state, _):
        _, state = tx.update(_sum(clip, grads, state.threshold.reference), state)
        return state, None

    state = jax.jit(lambda s: jax.lax.scan(step, s, length=600)[0])(tx.init(jnp.zeros(2)))
    share = np.mean(norms <= float(state.threshold.reference))
    assert abs(share - quantile) < 0.04


def test_noise_scales_match_the_paper():
    sigma, share, batch_size, threshold = 1.5, 0.04, 10, 0.3
    clip = dpoptax.contrib.adaptive_clip(threshold, count_share=share, learning_rate=1e-3)
    rows, nobody = np.zeros((1, 20_000), np.float32), np.zeros(1, bool)
    empty = jax.jit(lambda rows, mask: _sum(clip, rows, threshold, mask))(rows, nobody)

    @jax.jit
    @jax.vmap
    def releases(seed):
        tx = _stage(clip, noise_multiplier=sigma, batch_size=batch_size, key=jax.random.key(seed))
        mean, state = tx.update(empty, tx.init(jnp.zeros(20_000)))
        return jnp.std(mean), jnp.log(state.threshold.reference / threshold) / -1e-3

    stds, shares = releases(jnp.arange(400))
    sigma_b = sigma / (2 * share**0.5)
    z_delta = (sigma**-2 - (2 * sigma_b) ** -2) ** -0.5
    np.testing.assert_allclose(np.mean(stds), z_delta * threshold / batch_size, rtol=5e-3)
    np.testing.assert_allclose(np.mean(shares), 0.0, atol=4 * sigma_b / batch_size / 20)
    np.testing.assert_allclose(np.std(shares), sigma_b / batch_size, rtol=0.15)


def test_ledger_states_joint_cost():
    clip = dpoptax.contrib.adaptive_clip(0.1, count_share=0.04)
    tx = optax.chain(_stage(clip, noise_multiplier=1.5), optax.sgd(0.1))
    (ledger,) = dpoptax.ledgers(tx.init(jnp.zeros(3)))
    assert ledger.mechanism == dpoptax.extend.Mechanism(1.5, 8)
    gradient_multiplier = 1.5 / (1 - 0.04) ** 0.5
    count_multiplier = 2 * 1.5 / (2 * 0.04**0.5)  # over the sensitivity 1/2 of the centered count
    joint = (gradient_multiplier**-2 + count_multiplier**-2) ** -0.5
    np.testing.assert_allclose(ledger.mechanism.noise_multiplier, joint, rtol=1e-12)


@pytest.mark.parametrize("threshold", [1e-9, 0.3, 1e9])
def test_gradient_and_count_have_joint_sensitivity_one(threshold):
    clip = dpoptax.contrib.adaptive_clip(0.1, count_share=0.1)
    rng = np.random.default_rng(2)
    scales = 10.0 ** np.arange(-44, 38)[:, None, None]
    grads = jnp.asarray(rng.normal(size=(82, 1, 4)) * scales, jnp.float32)
    reference = jnp.float32(threshold)
    totals = jax.jit(jax.vmap(lambda g: sum_clipped(clip, g, None, reference)))(grads)
    norms = np.sqrt(np.sum(np.square(totals.gradient), axis=1) + np.square(totals.count))
    assert np.isfinite(norms).all()
    assert norms.max() <= 1 + 1e-6
    assert norms.max() > 0.999
    exact = np.linalg.norm(np.asarray(grads, np.float64)[:, 0], axis=1) <= threshold
    np.testing.assert_array_equal(totals.count > 0, exact)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_and_masked_examples_are_not_counted(bad):
    clip = dpoptax.contrib.adaptive_clip(0.1)
    grads = jnp.array([[bad, 1.0], [3.0, 4.0]])
    mask = np.array([True, False])
    total = jax.jit(lambda *of: sum_clipped(clip, *of))(grads, mask, np.float32(0.1))
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("name", helpers.slow_but(("mlp",), ("mlp", "tied_embeddings")))
def test_ghost_clipping_gives_same_gradient_and_count(name):
    network = NETWORKS[name]
    batch = network.batch(2, 6)
    points = comparison.points_of(network, 2)
    wide = dpoptax.contrib.adaptive_clip(1e6, count_share=0.5)
    mask = jnp.array([True, False, True, True, True, True])
    for threshold in (1e-9, _middle_norm(network, points, batch), 1e9):
        at = dataclasses.replace(points, reference=jnp.float32(threshold))
        got, want = comparison.both(network, wide, at, batch, mask)
        assert isinstance(got, dpoptax.extend.CountedGradient)
        comparison.close(got, want)
    assert abs(want.count) == 5 * wide.count_share**0.5  # all on one side, except masked ones


def _middle_norm(network, points, batch):
    """Returns a norm that half of the counted gradients exceed, with no norm close to it."""

    def norm(example, key):
        args = (example, key) if network.keyed else (example,)
        grads = [jax.grad(network.loss)(point, *args) for point in points.points]
        total = jax.tree.map(lambda *g: sum(map(jnp.multiply, points.weights, g)), *grads)
        return optax.tree.norm(total)

    keys = jax.random.split(jax.random.key(7), 6)
    options = comparison.QUICK
    norms = np.sort(jax.jit(jax.vmap(norm), compiler_options=options)(batch, keys))
    return float(norms[2:4].mean())


def test_extreme_and_non_finite_examples_are_counted():
    clip = dpoptax.contrib.adaptive_clip(0.1, count_share=0.5)
    params = helpers.mlp_params(0)
    x, y = helpers.mlp_batch(0, 6)
    x = x.at[1].set(jnp.nan)
    points = dataclasses.replace(dpoptax.gradient_points((), params), reference=jnp.float32(0.8))
    grad_fns = [
        jax.jit(
            functools.partial(
                dpoptax.clipped_grad(helpers.mlp_loss, clip, method=method, microbatch_size=4),
                points,
            )
        )
        for method in ("auto", "vmap", "recompute")
    ]
    for scale, examples in ((1e-30, 5), (1.0, 5), (1e9, 5), (jnp.inf, 4)):
        sums = [grad_fn((x.at[2].multiply(scale), y)).sum for grad_fn in grad_fns]
        for other in sums[1:]:
            comparison.close(sums[0], other)
        signs = float(sums[0].count) / clip.count_share**0.5
        assert signs == pytest.approx(round(signs), abs=1e-5)
        assert round(signs) % 2 == examples % 2


def test_refuses_counts_of_too_many_examples():
    """The rounding of such counts is not bounded, except with formed gradients."""
    clip = dpoptax.contrib.adaptive_clip(0.1)
    batch = jax.ShapeDtypeStruct((2**16 + 1, 2), jnp.float32)
    points = dpoptax.GradientPoints((jnp.zeros(2),), (1.0,), reference=jnp.float32(0.1))

    def total(batch, **options):
        grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(w * x), clip, **options)
        return grad_fn(points, batch).sum

    with pytest.raises(ValueError, match="exactly, got 65537"):
        jax.eval_shape(lambda batch: total(batch, microbatch_size=2**10), batch)
    jax.eval_shape(lambda batch: total(batch, method="vmap"), batch)


@pytest.mark.slow
def test_forms_no_per_example_gradient():
    clip = dpoptax.contrib.adaptive_clip(0.1)
    weights, batch = jnp.zeros((300, 200)), (jnp.ones((64, 300)), jnp.ones((64, 200)))
    points = dataclasses.replace(dpoptax.gradient_points((), weights), reference=jnp.float32(1.0))

    def memory(method):
        grad_fn = dpoptax.clipped_grad(
            lambda w, e: jnp.sum(jnp.tanh(e[0] @ w) * e[1]), clip, method=method
        )
        compiled = jax.jit(grad_fn).lower(points, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert memory("auto") < 64 * 300 * 200 * 4 / 4 < memory("vmap")


def test_per_example_stages_refuse_adaptive_clip():
    clip = dpoptax.contrib.adaptive_clip(0.1)
    with pytest.raises(ValueError, match=r"clipped_grad.*adaptive_gaussian_noise"):
        dpoptax.clip_and_noise(clip, noise_multiplier=1.0, batch_size=2, key=KEY)
    with pytest.raises(ValueError, match="must work with any noise stage"):
        dpoptax.extend.clip_per_example(clip)


def test_bfloat16_parameters_get_bfloat16_updates():
    clip = dpoptax.contrib.adaptive_clip(0.1)
    params = jnp.zeros(3, jnp.bfloat16)
    tx, rows = _stage(clip), jnp.ones((2, 3), jnp.bfloat16)
    mean, _ = jax.jit(lambda rows: tx.update(_sum(clip, rows, 0.1), tx.init(params), params))(rows)
    assert mean.dtype == jnp.bfloat16


def test_errors_name_missing_and_foreign_thresholds():
    clip = dpoptax.contrib.adaptive_clip(0.1)
    grad_fn = dpoptax.clipped_grad(lambda w, x: jnp.sum(w * x), clip)
    params, batch = jnp.zeros(3), jnp.ones((2, 3))
    plain = dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=2, key=KEY)
    plain = jax.jit(plain.init)(params)
    with pytest.raises(ValueError, match=r"needs the threshold.*adaptive_gaussian_noise"):
        grad_fn(dpoptax.gradient_points(plain, params), batch)
    strategy = dpoptax.matrix.BandedToeplitz((1.0, 0.5))
    for other in (
        dpoptax.gaussian_noise(noise_multiplier=1.0, batch_size=2, key=KEY),
        dpoptax.correlated_noise(strategy, noise_multiplier=1.0, batch_size=2, key=KEY),
    ):
        with pytest.raises(TypeError, match=r"only noise stage is.*adaptive_gaussian_noise"):
            other.update(_sum(clip, batch, 0.1), other.init(params))
    followed = ReferenceState(params)
    with pytest.raises(ValueError, match="needs the threshold"):
        grad_fn(dpoptax.gradient_points(followed, params), batch)
    tx = _stage(dpoptax.contrib.adaptive_clip(0.2))
    with pytest.raises(TypeError, match="same clip to both"):
        jax.eval_shape(lambda: tx.update(_sum(clip, batch, 0.1), tx.init(params)))
    with pytest.raises(TypeError, match="needs a `ClippedSum`"):
        jax.eval_shape(lambda: tx.update(params, tx.init(params)))
    with pytest.raises(TypeError, match=r"must be a `dpoptax\.contrib\.adaptive_clip"):
        _stage(dpoptax.l2_clip(1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantile": 1.5}, "`quantile` must .* got 1.5"),
        ({"count_share": 0.0}, "`count_share` must .* got 0"),
        ({"count_share": 1.0}, "`count_share` must .* got 1"),
        ({"learning_rate": 0.0}, "`learning_rate` must .* got 0"),
        ({"initial_l2_clip_norm": -1.0}, "`initial_l2_clip_norm` must .* got -1"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        dpoptax.contrib.adaptive_clip(**{"initial_l2_clip_norm": 0.1, **change})


def test_fixed_point_releases_are_on_grid():
    clip = dpoptax.contrib.adaptive_clip(0.5, count_share=0.04)
    release = {"noise_multiplier": 1.5, "batch_size": 4.0}
    step = dpoptax.extend.fixed_point_grid(clip, **release)
    params, threshold = jnp.zeros(2000), jnp.float32(0.5)
    pair = dpoptax.extend.CountedGradient(jnp.linspace(-1 / 3, 1 / 3, 2000), jnp.float32(-0.3))
    for fixed_point in (False, True):
        tx = dpoptax.contrib.adaptive_gaussian_noise(
            clip, **release, key=jax.random.key(0), fixed_point=fixed_point
        )
        state = tx.init(params)
        clipped = dpoptax.extend.trust_clipped(pair, clip, threshold)
        mean, state = jax.jit(tx.update)(clipped, state, params)
        total = np.asarray(mean) * math.sqrt(1 - clip.count_share) / 0.5 * 4
        on_grid = np.abs(total / step - np.rint(total / step)).max() < 0.3
        assert on_grid == fixed_point
        assert np.std(total - np.asarray(pair.gradient)) == pytest.approx(1.5, rel=0.06)
        share = 0.5 - math.log(state.threshold.reference / 0.5) / 0.2
        assert abs((2 * share - 1) * 0.2 * 4 - pair.count) < 6 * 1.5
        (ledger,) = dpoptax.ledgers(state)
        assert ledger.mechanism.fixed_point is fixed_point
        assert ledger.releases == 1
