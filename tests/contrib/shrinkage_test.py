"""Tests of shrinkage of noisy gradients: the papers' formulas, lower error, only public inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from tests.helpers import slow_but
from tests.oracles import shrinkage as oracle

pytestmark = pytest.mark.optimized

SHAPES = {"square": (12, 12), "wide": (5, 40), "tall": (40, 5), "conv": (3, 3, 4, 20)}


def _low_rank(rng, shape, singular_values):
    matrix = (int(np.prod(shape[:-1])), shape[-1])
    left = np.linalg.qr(rng.normal(size=(matrix[0], len(singular_values))))[0]
    right = np.linalg.qr(rng.normal(size=(matrix[1], len(singular_values))))[0]
    return ((left * singular_values) @ right.T).reshape(shape)


def _noisy(shape, stddev, seed=0, strength=4.0):
    """Returns a kernel of rank 2 above the noise edge, and noise."""
    rng = np.random.default_rng(seed)
    edge = stddev * (np.sqrt(np.prod(shape[:-1])) + np.sqrt(shape[-1]))
    signal = _low_rank(rng, shape, np.array([strength, strength / 3]) * edge)
    return signal, signal + stddev * rng.normal(size=shape)


def _run(tx, gradients):
    """Returns the outputs for a sequence of trees, compiled."""
    update, state, out = jax.jit(tx.update), tx.init(gradients[0]), []
    for g in gradients:
        updates, state = update(g, state, gradients[0])
        out.append(updates)
    return out


def _tree(shape, stddev, seed):
    rng = np.random.default_rng(100 + seed)
    kernel = _noisy(shape, stddev, seed)[1]
    return {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.asarray(rng.normal(size=7))}


@pytest.mark.parametrize("name", slow_but(("conv",), SHAPES))
@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_singular_value_shrinkage_matches_paper(name, decay):
    shape, stddev = SHAPES[name], 0.3
    gradients = [_tree(shape, stddev, seed) for seed in range(4)]
    got = _run(dpoptax.contrib.singular_value_shrinkage(stddev, decay=decay), gradients)
    mean, bias, ranks = oracle.RunningMean(decay), oracle.RunningMean(decay), []
    for out, g in zip(got, gradients, strict=True):
        m, left = mean(np.asarray(g["kernel"], np.float64).reshape(-1, shape[-1]))
        want = oracle.of_singular_values(oracle.optimal_shrinker, m, stddev * left)
        np.testing.assert_allclose(out["kernel"].reshape(m.shape), want, rtol=1e-3, atol=2e-4)
        ranks.append(np.linalg.matrix_rank(want, tol=1e-9))
        np.testing.assert_allclose(out["bias"], bias(np.asarray(g["bias"]))[0], rtol=1e-5)
    assert 0 < ranks[0] < min(m.shape)


@pytest.mark.parametrize("per_leaf", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_james_stein_matches_positive_part_estimator(per_leaf, decay):
    rng = np.random.default_rng(0)
    scales = {"loud": 3.0, "even": 1.0, "quiet": 0.05}
    gradients = [
        {k: jnp.asarray(s * rng.normal(size=(4, 5)), jnp.float32) for k, s in scales.items()}
        for _ in range(4)
    ]
    got = _run(dpoptax.contrib.james_stein(0.7, per_leaf=per_leaf, decay=decay), gradients)
    means = {k: oracle.RunningMean(decay) for k in scales}
    cut = 0
    for out, g in zip(got, gradients, strict=True):
        flat = {k: means[k](np.asarray(x, np.float64).ravel()) for k, x in g.items()}
        left = flat["loud"][1]
        if per_leaf:
            want = {k: oracle.james_stein(m, 0.7 * left) for k, (m, _) in flat.items()}
        else:
            whole = oracle.james_stein(np.concatenate([flat[k][0] for k in scales]), 0.7 * left)
            want = dict(zip(scales, np.split(whole, 3), strict=True))
        for k in scales:
            np.testing.assert_allclose(out[k].ravel(), want[k], rtol=1e-4, atol=1e-6)
            cut += not np.any(want[k])
    assert cut > 0 if per_leaf else cut == 0


def test_does_not_shrink_few_coordinates():
    g = [jnp.array([0.1, -0.1]), jnp.array(0.2), jnp.zeros((0, 3)), jnp.zeros(2)]
    for tx in (
        dpoptax.contrib.james_stein(1.0, per_leaf=True),
        dpoptax.contrib.singular_value_shrinkage(1.0),
    ):
        (out,) = _run(tx, [g])
        jax.tree.map(np.testing.assert_array_equal, out, g)


def _errors(tx, signal, stddev, draws=200):
    """Returns the mean squared errors of estimate and release, each with its standard error.

    Each draw has a new transform, so each run has one release.
    """
    noise = stddev * np.random.default_rng(3).normal(size=(draws, *signal.shape))
    noisy = jnp.asarray(signal + noise, jnp.float32)
    out = jax.jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[0]))(noisy)
    squares = [np.mean((np.asarray(x) - signal) ** 2, (1, 2)) for x in (out, noisy)]
    return [(s.mean(), s.std() / draws**0.5) for s in squares]


@pytest.mark.parametrize("strength", slow_but((0.6,), (0.0, 0.6, 1.5, 4.0)))
@pytest.mark.parametrize(
    ("make", "bound"),
    [(dpoptax.contrib.singular_value_shrinkage, 0.35), (dpoptax.contrib.james_stein, 1.0)],
)
def test_reduces_error_on_low_rank_signals(make, bound, strength):
    stddev = 0.2
    signal = _noisy((30, 50), stddev, strength=strength)[0]
    (error, spread), (raw, _) = _errors(make(stddev), signal, stddev)
    assert raw == pytest.approx(stddev**2, rel=0.02)
    assert error + 5 * spread < bound * raw


@pytest.mark.slow
@pytest.mark.parametrize("strength", [0.0, 1.5, 6.0])
def test_error_matches_theory_of_optimal_shrinker(strength):
    # Gavish and Donoho, section 4.1: Σ x²(1 − c²), or all of x² below the edge.
    stddev, shape = 1.0, (80, 120)
    edge = stddev * (np.sqrt(shape[0]) + np.sqrt(shape[1]))
    x = strength * edge
    signal = _low_rank(np.random.default_rng(1), shape, np.array([x]))
    beta, unit = shape[0] / shape[1], np.sqrt(shape[1]) * stddev
    xn = x / unit
    y = np.sqrt((xn + 1 / xn) * (xn + beta / xn)) if xn else 0.0
    best = x**2 * (1 - oracle.product_of_cosines(y, beta) ** 2)
    ((error, spread), _) = _errors(
        dpoptax.contrib.singular_value_shrinkage(stddev), signal, stddev, 16
    )
    total = error * signal.size
    assert abs(total - best) < 0.05 * best + 6 * spread * signal.size + 20 * edge


def test_running_mean_recovers_signal_below_noise_edge():
    stddev, shape = 1.0, (20, 30)
    signal = _noisy(shape, stddev, strength=0.5)[0]
    rng = np.random.default_rng(5)
    gradients = [
        jnp.asarray(signal + stddev * rng.normal(size=shape), jnp.float32) for _ in range(60)
    ]
    alone = _run(dpoptax.contrib.singular_value_shrinkage(stddev), gradients)[-1]
    averaged = _run(dpoptax.contrib.singular_value_shrinkage(stddev, decay=0.95), gradients)[-1]
    mean = _run(dpoptax.low_pass([0.05], [-0.95]), gradients)[-1]

    def error(out):
        return float(jnp.mean((out - signal) ** 2))

    assert error(averaged) < 0.5 * error(mean)
    assert error(averaged) < 0.5 * error(alone)


@pytest.mark.parametrize(
    "make",
    [
        dpoptax.contrib.singular_value_shrinkage,
        dpoptax.contrib.james_stein,
        dpoptax.contrib.scale_by_shrunk_muon,
    ],
)
def test_nan_gradients_stay_nan(make):
    g = {"w": jnp.full((4, 3), jnp.nan), "b": jnp.full(5, jnp.nan)}
    tx = make(0.1)
    for out in _run(tx, [g, g]):
        assert all(bool(jnp.isnan(leaf).all()) for leaf in jax.tree.leaves(out))


@pytest.mark.parametrize(
    "make",
    [
        dpoptax.contrib.singular_value_shrinkage,
        dpoptax.contrib.james_stein,
        dpoptax.contrib.scale_by_shrunk_muon,
    ],
)
@pytest.mark.parametrize("scale", [0.0, 1e-15, 1e15])
def test_finite_at_any_scale(make, scale):
    g = {"w": scale * jnp.eye(4, 3), "b": scale * jnp.arange(5.0)}
    out = _run(make(0.1 * scale), [g])[0] if scale else _run(make(0.1), [g])[0]
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(out))


def test_does_not_shrink_without_noise():
    g = _tree((6, 9), 0.3, 0)
    for tx in (dpoptax.contrib.singular_value_shrinkage(0.0), dpoptax.contrib.james_stein(0.0)):
        (out,) = _run(tx, [g])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), out, g)


@pytest.mark.parametrize("name", SHAPES)
def test_shrunk_muon_matches_formula(name):
    shape, stddev, decay = SHAPES[name], 0.3, 0.8
    gradients = [_tree(shape, stddev, seed) for seed in range(4)]
    got = _run(dpoptax.contrib.scale_by_shrunk_muon(stddev, decay=decay), gradients)
    adam = dpoptax.extend.scale_by_lp_adam((0.1,), (-0.9,), stddev=stddev)
    others = _run(adam, [{"bias": g["bias"]} for g in gradients])
    mean = oracle.RunningMean(decay)
    rows, columns = int(np.prod(shape[:-1])), shape[-1]
    for out, g, other in zip(got, gradients, others, strict=True):
        m, left = mean(np.asarray(g["kernel"], np.float64).reshape(rows, columns))
        want = oracle.of_singular_values(oracle.product_of_cosines, m, stddev * left)
        want *= np.sqrt(max(1.0, columns / rows))
        np.testing.assert_allclose(out["kernel"].reshape(m.shape), want, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose(out["bias"], other["bias"], rtol=1e-5)


@pytest.mark.slow
def test_shrunk_muon_without_noise_matches_optax():
    params = {"kernel": jnp.zeros((5, 9))}
    gradients = [
        {"kernel": jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (5, 9))}
        for i in range(3)
    ]
    got = _run(dpoptax.contrib.shrunk_muon(0.5, stddev=0.0, decay=0.9), gradients)
    # Enough cubic Newton–Schulz steps to converge; optax scales by shape.
    muon = optax.contrib.muon(
        0.5, ns_coeffs=(1.5, -0.5, 0.0), ns_steps=40, beta=0.9, nesterov=False
    )
    for out, want in zip(got, _run(muon, gradients), strict=True):
        np.testing.assert_allclose(out["kernel"], want["kernel"], rtol=1e-3, atol=1e-4)
    assert jnp.any(params["kernel"] != got[0]["kernel"])


@pytest.mark.slow
def test_cosine_weights_beat_constant_weights():
    # They come nearer to the signal's polar factor than Muon's weights of 1 or any other constant.
    stddev, shape = 1.0, (40, 60)
    rng = np.random.default_rng(0)
    edge = stddev * (np.sqrt(shape[0]) + np.sqrt(shape[1]))
    signal = _low_rank(rng, shape, np.array([1.2, 0.7]) * edge)
    u, _, v = np.linalg.svd(signal)
    polar = u[:, :2] @ v[:2] * np.sqrt(shape[1] / shape[0])
    errors = {"shrunk": [], "muon": [], "seen": []}
    for _ in range(20):
        noisy = {"kernel": jnp.asarray(signal + stddev * rng.normal(size=shape), jnp.float32)}
        (shrunk,) = _run(dpoptax.contrib.scale_by_shrunk_muon(stddev, decay=0.0), [noisy])
        (muon,) = _run(dpoptax.contrib.scale_by_shrunk_muon(0.0, decay=0.0), [noisy])
        u, s, v = np.linalg.svd(shrunk["kernel"], full_matrices=False)
        seen = (u * (s > 1e-4)) @ v * np.sqrt(shape[1] / shape[0])
        for name, x in (("shrunk", shrunk["kernel"]), ("muon", muon["kernel"]), ("seen", seen)):
            errors[name].append(np.sum((np.asarray(x) - polar) ** 2))
    means = {name: np.mean(found) for name, found in errors.items()}
    assert means["shrunk"] < 0.95 * means["seen"] < means["muon"]


@pytest.mark.slow
def test_shrinks_pure_noise_and_keeps_ledger():
    release = {"noise_multiplier": 1.0, "batch_size": 64}
    clip = dpoptax.l2_clip(1.0)
    stddev = dpoptax.extend.noise_stddev(clip, **release)
    params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
    for tx in (
        dpoptax.contrib.singular_value_shrinkage(stddev),
        dpoptax.contrib.james_stein(stddev, per_leaf=True),
        dpoptax.contrib.scale_by_shrunk_muon(stddev, decay=0.0),
    ):
        chain = optax.chain(dpoptax.gaussian_noise(**release, key=jax.random.key(0)), tx)
        state = chain.init(params)
        out, state = jax.jit(
            lambda state, chain=chain: chain.update(
                dpoptax.extend.trust_clipped(params, clip), state, params
            )
        )(state)
        # With noise only, almost nothing of the kernel remains.
        assert np.linalg.norm(out["w"]) < 0.2 * stddev * 600**0.5 + 1e-6
        (ledger,) = dpoptax.ledgers(state)
        assert (ledger.mechanism.noise_multiplier, ledger.releases) == (1.0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpoptax.contrib.singular_value_shrinkage(-1.0), "`stddev` must .* got -1"),
        (lambda: dpoptax.contrib.james_stein(float("nan")), "`stddev` must .* got nan"),
        (lambda: dpoptax.contrib.james_stein(1.0, decay=1.0), "`decay` must .* got 1.0"),
        (lambda: dpoptax.contrib.scale_by_shrunk_muon(float("inf")), "`stddev` must .* got inf"),
        (lambda: dpoptax.contrib.scale_by_shrunk_muon(1.0, b1=1.0), "`b1` must .* got 1.0"),
        (lambda: dpoptax.contrib.shrunk_muon(0.1, stddev=1.0, b2=1.0), "`b2` must .* got 1.0"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
