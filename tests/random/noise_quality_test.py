"""Tests of noise quality: deep tails, whole runs, fixed point and keys."""

import itertools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

import dpoptax
from dpoptax._random import box_muller
from dpoptax._release import fixed_point as _fixed_point
from tests import helpers

pytestmark = pytest.mark.optimized

CLIP = dpoptax.l2_clip(2.0)
STAGES = {"floating point": {}, "fixed point": {"fixed_point": True}}


def _noise(fixed_point=False, **kwargs):
    arguments = {"noise_multiplier": 1.5, "batch_size": 4, "key": jax.random.key(0)}
    return dpoptax.gaussian_noise(**{**arguments, **kwargs}, fixed_point=fixed_point)


def _release(tx, total, steps=1):
    state, releases = tx.init(total), []
    update = jax.jit(tx.update)
    for _ in range(steps):
        mean, state = update(dpoptax.extend.trust_clipped(total, CLIP), state)
        releases.append(mean)
    return releases


@pytest.mark.parametrize("steps", [100, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", STAGES)
def test_tails_are_normal_to_five_standard_deviations(stage, steps):
    """Uses small releases, because XLA's older code generator is slow on large ones."""
    size = 10**4
    count = steps * size
    releases = _release(_noise(**STAGES[stage]), jnp.zeros(size), steps)
    stddev = 1.5 * 2.0 / 4
    if stage == "fixed point":
        stddev *= 1 + math.sqrt(size) * _fixed_point.grid(2.0, 1.5, 4) / 2.0
    tree_noise = np.concatenate(releases).astype(np.float64) / stddev
    for edge in (1.0, 2.0, 3.0, 4.0, 4.5, 5.0):
        for beyond in (np.sum(tree_noise > edge), np.sum(tree_noise < -edge)):
            tail = stats.binomtest(int(beyond), count, stats.norm.sf(edge))
            assert tail.pvalue > 1e-3, (edge, beyond)
    wrong = stats.binomtest(int(np.sum(tree_noise > 4.0)), count, stats.norm.sf(4.0 * 0.95))
    assert wrong.pvalue < 1e-6


def _values_of_jax():
    """Returns all 2²³ equally likely values of a float32 normal of JAX."""
    bits = np.arange(2**23, dtype=np.uint32) | np.uint32(0x3F800000)
    uniform, low = bits.view(np.float32) - np.float32(1), np.nextafter(np.float32(-1), 0)
    uniform = np.maximum(low, uniform * (np.float32(1) - low) + low)
    return np.asarray(jax.jit(lambda u: np.float32(math.sqrt(2)) * jax.lax.erf_inv(u))(uniform))


def _tail_of_box_muller(edges):
    """Returns P[x > edge] for edges from 4, with the available radii and a uniform angle."""
    first = np.arange(int(2**32 * math.exp(-8.0)) + 1, dtype=np.uint32)
    last = np.random.default_rng(0).integers(0, 2**32, first.size, dtype=np.uint32)
    radii = math.sqrt(2) * np.float64(box_muller._polar(first, last)[0])
    angles = (np.arccos(edge / radii[radii > edge]).sum() for edge in edges)
    return np.array([angle / (math.pi * 2**32) for angle in angles])


def _delta(mass, width, sigma, delta):
    """Returns δ of one release at the ε that corresponds to `delta`, from bins of the noise."""
    epsilon = helpers.event_epsilon(dp_accounting.GaussianDpEvent(sigma), delta)
    moved = np.roll(mass, round(1 / (sigma * width)))
    return np.maximum(moved - math.exp(epsilon) * mass, 0).sum()


def test_tail_gaps_raise_delta_only_for_jax_random_normal():
    """Assumes a resolution of 0.02 standard deviations and one coordinate moved by an example."""
    width = 0.02
    edges = np.arange(-500, 501) * width
    jax_normal = np.histogram(_values_of_jax(), edges)[0] / 2**23
    tail = stats.norm.sf(edges)
    tail[edges > 4] = _tail_of_box_muller(edges[edges > 4])
    ours = np.where(edges[1:] > 0, tail[:-1] - tail[1:], 0.0)
    ours = ours + ours[::-1]
    for sigma, least in ((0.5, 1e-3), (1.0, 5e-5), (2.0, 1.2e-5)):
        found = {
            name: _delta(x, width, sigma, 1e-5)
            for name, x in (("jax.random.normal", jax_normal), ("ours", ours))
        }
        print(f"sigma={sigma}, delta=1e-5: " + ", ".join(f"{n} {d:.2g}" for n, d in found.items()))
        assert found["ours"] < 1.02e-5
        assert found["jax.random.normal"] > least  # docs/privacy/floating-point.md


def _spread(last, multiplier):
    return ((last * multiplier % 2**32) // 2**9 + 0.5) / 2**23


def _pairs(rng, count, multiplier):
    """Returns pairs from random words with another multiplier; with 0 they lie on 2³² circles."""
    first, last = rng.integers(0, 2**32, (2, count))
    u = (first % 2**31 + _spread(last, multiplier)) / 2**32
    radius = np.sqrt(-2 * np.where(first >> 31, np.log1p(-u), np.log(u)))
    angle = np.pi / 2 * ((last & (2**30 - 1)) ^ 2**29) / 2**30
    signs = np.where(last >> 31, -1, 1), np.where(last >> 30 & 1, -1, 1)
    return radius * np.cos(angle) * signs[0], radius * np.sin(angle) * signs[1]


def _is_none(x, y, multiplier, resolution):
    """Returns whether a pair in the tails, at this resolution, is recognizably not noise."""
    x, y = (np.rint(z / resolution) * resolution for z in (x, y))
    radius, reach = math.hypot(x, y), resolution / math.sqrt(2) + 2e-6
    middle, half = (a * 2**31 / np.pi for a in (math.atan2(abs(y), abs(x)), reach / radius))
    within = np.arange(math.ceil(middle - half), math.floor(middle + half) + 1)
    within = within[(within >= 0) & (within < 2**30)]
    along = radius * (within - middle) * np.pi / 2**31
    room = np.sqrt(np.maximum(reach**2 - along**2, 0))
    last = int(x < 0) << 31 | int(y < 0) << 30 | within ^ 2**29
    ends = (2**32 * np.exp(-((radius + sign * room) ** 2) / 2) for sign in (1, -1))
    least, most = (end - _spread(last, multiplier) for end in ends)
    return not np.any(np.floor(most) >= np.maximum(np.ceil(least), 0))


@pytest.mark.parametrize(
    ("size", "resolution", "runs", "of_circles"),
    [
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in ((10**5, 1e-4, 50, 0), (10**6, 1e-4, 20, 0))
        ),
        (10**6, 1e-5, 20, 5),
    ],
)
def test_tail_pairs_do_not_reveal_the_sum(size, resolution, runs, of_circles):
    """Pairs of noise on circles would reveal a move of 1/√d per number at σ = 1; ours do not."""
    told = dict.fromkeys(itertools.product(("circles", "ours"), (False, True)), 0)
    for name, multiplier in (("circles", 0), ("ours", box_muller._SPREAD)):
        rng = np.random.default_rng(0)
        for _ in range(runs):
            pairs = np.stack(_pairs(rng, size // 2, multiplier), axis=1)
            tail = pairs[np.hypot(*pairs.T) > 4.6]
            for moved in (False, True):
                seen = tail + moved / math.sqrt(size)
                told[name, moved] += any(_is_none(*pair, multiplier, resolution) for pair in seen)
    print(f"{size} coordinates to {resolution}, of {runs} releases: {told}")
    assert told["circles", False] == told["ours", False] == told["ours", True] == 0
    assert told["circles", True] >= of_circles


def _train_with_key_checker(tx):
    """Takes three steps with donation; JAX's checker raises if a key is used twice."""
    params, batch = helpers.mlp_params(1), helpers.mlp_batch(0, 4)
    grad_fn = dpoptax.clipped_grad(helpers.mlp_loss, CLIP, method="vmap")

    def step(params, opt_state):
        grads = grad_fn(dpoptax.gradient_points(opt_state, params), batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    step = jax.jit(step, donate_argnums=(0, 1))
    with jax.debug_key_reuse(True):
        opt_state = tx.init(params)
        for _ in range(3):
            params, opt_state = step(params, opt_state)


@pytest.mark.parametrize("fixed_point", [False, True])
def test_key_checker_of_jax_accepts_training(fixed_point):
    _train_with_key_checker(optax.chain(_noise(fixed_point), dpoptax.disk(0.7, 0.5)))


def test_neighboring_draws_of_a_release_are_independent():
    (mean,) = _release(_noise(), jnp.zeros(1_000_000))
    for lag in (1, 2, 3, 128, 1024, 4096, 500_000):
        correlation = np.corrcoef(mean[lag:], mean[:-lag])[0, 1]
        assert abs(correlation) < 5 / 1_000_000**0.5, lag
        squares = np.corrcoef(mean[lag:] ** 2, mean[:-lag] ** 2)[0, 1]
        assert abs(squares) < 5 / 1_000_000**0.5, lag


def test_fixed_point_releases_lie_on_grid_for_any_sum():
    step = _fixed_point.grid(2.0, 1.5, 4)
    assert math.log2(step).is_integer()
    for total in (jnp.zeros(10_000), jnp.linspace(-1 / 3, 1 / 3, 10_000)):
        (mean,) = _release(_noise(True), total)
        steps = np.asarray(mean, np.float64) * 4 / step
        np.testing.assert_array_equal(steps, np.rint(steps))
        assert len(np.unique(steps % 16)) == 16


def test_fixed_point_noise_has_stated_mean_and_stddev():
    total = jnp.full(50_000, 5.0 / 3)
    (mean,) = _release(_noise(True), total)
    step = _fixed_point.grid(2.0, 1.5, 4)
    stddev = 1.5 * (2.0 + math.sqrt(50_000) * step) / 4
    tree_noise = (np.asarray(mean, np.float64) - 5.0 / 12) / stddev
    assert stats.kstest(tree_noise, "norm").pvalue > 1e-3
    assert stats.kstest(tree_noise * 1.05, "norm").pvalue < 1e-6


def test_grid_leaves_room_for_sum_and_noise():
    for sigma, batch_size in ((0.3, 100_000), (1.0, 256), (50.0, 1)):
        step = _fixed_point.grid(2.0, sigma, batch_size)
        assert 2 * 2.0 * batch_size / step <= 2**30
        assert 17 * sigma * 2.0 / step < 2**30
        assert step <= max(2**-17 * sigma * 2.0, 2**-27 * batch_size * 2.0)
    extreme = jnp.array([1e30, -1e30, 3e38])
    (mean,) = _release(_noise(True, batch_size=256), extreme)
    largest = 2**30 * _fixed_point.grid(2.0, 1.5, 256) / 256
    np.testing.assert_allclose(mean, [largest, -largest, largest], rtol=0.1)


def test_refuses_fixed_point_noise_beyond_int32():
    """Clamping noise of σ√d = 10¹⁰ to int32 left a ninth of the stated standard deviation."""
    with pytest.raises(ValueError, match=r"at most .* grid steps.*Decrease `noise_multiplier`"):
        _release(_noise(True, noise_multiplier=1e8), jnp.zeros(10_000))
    with pytest.raises(ValueError, match="must be at least one grid step"):
        _release(_noise(True, noise_multiplier=0.25, batch_size=1e9), jnp.zeros(1))
    (mean,) = _release(_noise(True, noise_multiplier=2e4), jnp.zeros(10_000))
    step = _fixed_point.grid(2.0, 2e4, 4)
    stddev = 2e4 * (2.0 + math.sqrt(10_000) * step) / 4
    assert stats.kstest(np.asarray(mean) / stddev, "norm").pvalue > 1e-3


def test_rounded_sum_moves_by_at_most_stated_sensitivity():
    step = _fixed_point.grid(2.0, 1.5, 4)
    rng = np.random.default_rng(0)
    total = rng.normal(size=1_000).astype(np.float32)
    moved = total + 2.0 * np.float32(1 / math.sqrt(1_000))
    clipped = dpoptax.extend.trust_clipped(jnp.zeros(1_000), dpoptax.l2_clip(2.0))
    bound = _fixed_point.sensitivity_on_grid(clipped, step)
    key = jax.random.key(0)
    releases = [_fixed_point.add_noise(jnp.asarray(t), 3.0, key, step) for t in (total, moved)]
    difference = np.asarray(releases[1], np.float64) - np.asarray(releases[0])
    assert 1.99 < np.linalg.norm(difference) <= bound


def test_fixed_point_without_noise_is_exact_and_keeps_dtypes():
    total = jnp.array([1 / 3, -7.0])
    (mean,) = _release(_noise(True, noise_multiplier=0.0), total)
    np.testing.assert_array_equal(mean, total / 4)
    half = jnp.ones(3, jnp.bfloat16)
    tx = _noise(True)
    mean, _ = tx.update(dpoptax.extend.trust_clipped(half, CLIP), tx.init(half), half)
    assert mean.dtype == jnp.bfloat16


def test_system_keys_are_distinct():
    keys = [dpoptax.random_key_from_os() for _ in range(100)]
    data = {tuple(np.asarray(jax.random.key_data(key)).tolist()) for key in keys}
    assert len(data) == 100
    assert len({high for high, _ in data}) == len({low for _, low in data}) == 100
    (mean,) = _release(_noise(key=keys[0]), jnp.zeros(100))
    assert jnp.std(mean) > 0.3
