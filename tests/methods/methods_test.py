"""Tests every method against its paper's pseudo-code: 50 steps, non-convex, given noise."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from tests.helpers import slow_but
from tests.oracles import disk as disk_oracle
from tests.oracles import doppler as doppler_oracle
from tests.oracles import pmlf as pmlf_oracle

STEPS, BATCH, DIM, ETA, CLIP = 50, 4, 6, 0.3, 0.8


def _loss(x, example):
    """A smooth non-convex loss: tanh regression with a ripple."""
    u, v = example
    return 0.5 * (jnp.tanh(u @ x) - v) ** 2 + 0.1 * jnp.sum(jnp.cos(2.0 * x + u))


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    u = rng.normal(size=(STEPS, BATCH, DIM))
    v = rng.normal(size=(STEPS, BATCH))
    return rng.normal(size=DIM), u, v, 0.05 * rng.normal(size=(STEPS, DIM))


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


_gradient = jax.jit(jax.grad(_loss))


def _oracle_arguments(problem):
    x0, u, v, noise = problem
    batches = [[(u[t, i], v[t, i]) for i in range(BATCH)] for t in range(STEPS)]
    return (x0, batches, lambda x, e: np.asarray(_gradient(x, e))), noise


def _injected_noise(noise):
    """The noise stage with given noise: row t is added to the mean of step t."""

    def init_fn(params):
        del params
        return jnp.zeros([], jnp.int32)

    def update_fn(updates, count, params=None):
        del params
        return updates.sum / BATCH + jnp.asarray(noise)[count], count + 1

    return optax.GradientTransformation(init_fn, update_fn)


def _run(problem, method, learning_rate=ETA, clip=CLIP):
    """Returns the iterates x_0 … x_T of the method after clipped_grad."""
    x0, u, v, noise = problem
    tx = optax.chain(_injected_noise(noise), method, optax.sgd(learning_rate))
    grad_fn = dpoptax.clipped_grad(_loss, dpoptax.l2_clip(clip))

    def step(carry, batch):
        x, state = carry
        grads = grad_fn(dpoptax.gradient_points(state, x), batch)
        updates, state = tx.update(grads, state, x)
        x = optax.apply_updates(x, updates)
        return (x, state), x

    x0 = jnp.asarray(x0)
    _, xs = jax.lax.scan(step, (x0, tx.init(x0)), (jnp.asarray(u), jnp.asarray(v)))
    return np.concatenate([x0[None], xs])


def _same(got, want):
    assert np.abs(np.diff(want, axis=0)).max() > 1e-2
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    slow_but(("doppler-second-order",), ("doppler-second-order", "doppler-f5")),
)
def test_doppler_matches_oracle(problem, name):
    filt = dpoptax.filters.preset(name)
    arguments, noise = _oracle_arguments(problem)
    want = doppler_oracle.doppler(
        *arguments, eta=ETA, clip_norm=CLIP, b=filt.b, a=filt.a, noise=noise
    )
    _same(_run(problem, dpoptax.doppler(*filt)), want)


@pytest.mark.parametrize(
    ("kappa", "gamma"),
    [
        (0.7, 0.5),
        *(pytest.param(*gains, marks=pytest.mark.slow) for gains in ((0.5, -1.0), (0.3, 2.0))),
    ],
)
def test_disk_matches_oracle(problem, kappa, gamma):
    arguments, noise = _oracle_arguments(problem)
    want = disk_oracle.disk(
        *arguments,
        kappa=kappa,
        gamma=gamma,
        optimizer_update=disk_oracle.sgd(ETA),
        clip_norm=CLIP,
        noise=noise,
    )
    _same(_run(problem, dpoptax.disk(kappa, gamma)), want)


def test_disk_with_one_gradient_matches_oracle(problem):
    arguments, noise = _oracle_arguments(problem)
    want = disk_oracle.disk_one_gradient(
        *arguments,
        kappa=0.7,
        optimizer_update=disk_oracle.sgd(ETA),
        clip_norm=CLIP,
        noise=noise,
    )
    method = dpoptax.disk(0.7, None)
    _same(_run(problem, method), want)
    points = dpoptax.gradient_points(method.init(jnp.ones(2)), jnp.ones(2))
    assert len(points.points) == 1
    assert len(dpoptax.gradient_points(dpoptax.disk(1.0, 0.5).init(1.0), 1.0).points) == 1


@pytest.fixture(scope="module")
def with_the_hessian(problem):
    """Returns the iterates of DiSK with exact Hessian-vector products, by the oracle."""
    arguments, noise = _oracle_arguments(problem)
    product = jax.jit(lambda x, e, d: jax.jvp(lambda y: jax.grad(_loss)(y, e), (x,), (d,))[1])
    with jax.enable_x64(True):
        return disk_oracle.disk_hessian(
            *arguments,
            lambda x, e, d: np.asarray(product(x, e, d)),
            kappa=0.6,
            optimizer_update=disk_oracle.sgd(ETA),
            clip_norm=CLIP,
            noise=noise,
        )


def test_disk_with_exact_hessian_matches_oracle(problem, with_the_hessian):
    _same(_run(problem, dpoptax.disk(0.6, 0.0)), with_the_hessian)


@pytest.mark.slow
def test_disk_at_small_gamma_approaches_exact_hessian(problem, with_the_hessian):
    near = _run(problem, dpoptax.disk(0.6, 1e-4))
    np.testing.assert_allclose(near, with_the_hessian, atol=2e-3)


@pytest.mark.slow
def test_disk_with_swapped_gain_differs(problem):
    default, swapped = (
        _run(problem, dpoptax.disk(0.7, 0.5, filter_gain=gain)) for gain in (None, 0.3)
    )
    assert np.abs(default - swapped).max() > 1e-2
    np.testing.assert_array_equal(default, _run(problem, dpoptax.disk(0.7, 0.5, filter_gain=0.7)))


def _noiseless(problem):
    x0, u, v, noise = problem
    return x0, u, v, 0.0 * noise


@pytest.mark.slow
def test_disk_without_noise_and_clipping_is_nesterov(problem):
    x0, u, v, noise = _noiseless(problem)
    u, v = np.broadcast_to(u[:1], u.shape), np.broadcast_to(v[:1], v.shape)  # one fixed objective

    def full_gradient(x):
        grads = jax.vmap(jax.grad(_loss), (None, 0))(jnp.asarray(x), (u[0], v[0]))
        return np.asarray(grads.mean(0))

    kappa = 0.4
    # In m = η g̃, the filter is Nesterov's momentum 1 − κ with step size ηκ.
    want = disk_oracle.nesterov(
        x0,
        STEPS,
        full_gradient,
        eta=ETA * kappa,
        mu=1 - kappa,
        look_ahead=(1 - kappa) / kappa,
        first=ETA * full_gradient(x0),
    )
    _same(_run((x0, u, v, noise), dpoptax.disk(kappa, None), clip=1e6), want)


@pytest.mark.slow
def test_disk_at_gamma_minus_one_is_storm(problem):
    arguments, _ = _oracle_arguments(problem)
    want = disk_oracle.storm(*arguments, eta=ETA, alpha=0.6)
    _same(_run(_noiseless(problem), dpoptax.disk(0.6, -1.0), clip=1e6), want)


PMLF = [(1, 0.5), (2, 0.1), (4, 0.9), (3, 1.0), (5, 0.0)]
QUICK_PMLF = ((PMLF[2], "doppler-second-order"), (PMLF[3], "pmlf-cifar"))


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("length", "beta", "name"),
    [
        pytest.param(*window, name, marks=[pytest.mark.slow] * ((window, name) not in QUICK_PMLF))
        for window in PMLF
        for name in ("doppler-second-order", "none", "pmlf-cifar")
    ],
)
def test_pmlf_matches_oracle(problem, length, beta, name):
    filt = dpoptax.filters.preset(name)
    arguments, noise = _oracle_arguments(problem)
    want = pmlf_oracle.pmlf(
        *arguments,
        eta=ETA,
        clip_norm=CLIP,
        length=length,
        beta=beta,
        b=filt.b,
        a=filt.a,
        noise=noise,
    )
    _same(_run(problem, dpoptax.pmlf(length, beta, *filt)), want)


@pytest.mark.slow
def test_inner_outer_does_not_normalize(problem):
    x0, u, v, noise = problem
    k, beta, momentum = 3, 0.5, 0.8
    x, outer, window, want = x0, 0.0, [x0] * k, [x0]
    for t in range(STEPS):
        total = np.zeros(DIM)
        for i in range(BATCH):
            example = (u[t, i], v[t, i])
            inner = sum(beta**j * np.asarray(_gradient(y, example)) for j, y in enumerate(window))
            total += inner * min(1.0, CLIP / np.linalg.norm(inner))
        outer = momentum * outer + total / BATCH + noise[t]
        x = x - 0.05 * outer
        window = [x, *window[:-1]]
        want.append(x)
    _same(_run(problem, dpoptax.contrib.inner_outer(k, beta, momentum), 0.05), np.stack(want))


GAIN = {"noise_stddev": 1.0, "drift_stddev": 1.0}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: dpoptax.disk(0.0, 0.5), "`kappa` must .* got 0.0"),
        (lambda: dpoptax.disk(1.5, 0.5), "`kappa` must .* got 1.5"),
        (lambda: dpoptax.disk("0.7", 0.5), "`kappa` must be a Python number, got '0.7'"),
        (lambda: dpoptax.disk(0.5, float("nan")), "`gamma` must .* got nan"),
        (lambda: dpoptax.disk(0.7, [0.5]), r"`gamma` must be a Python number, got \[0.5\]"),
        (lambda: dpoptax.disk(0.5, 0.5, filter_gain=2.0), "`filter_gain` must .* got 2.0"),
        (lambda: dpoptax.pmlf(0, 0.5, [1.0]), "`length` must .* got 0"),
        (lambda: dpoptax.pmlf("2", 0.5, [1.0]), "`length` must be a Python number, got '2'"),
        (lambda: dpoptax.pmlf(2, 1.5, [1.0]), "`beta` must .* got 1.5"),
        (lambda: dpoptax.pmlf(2, 0.5, [0.5]), "gain"),
        (lambda: dpoptax.contrib.inner_outer(2, 0.5, 1.0), "`momentum` must .* got 1.0"),
        (lambda: dpoptax.adaptive_kalman(0.0), "`stddev` must .* got 0.0"),
        (lambda: dpoptax.adaptive_kalman("0.1"), "`stddev` must be a Python number, got '0.1'"),
        (lambda: dpoptax.adaptive_kalman(1.0, decay=1.0), "`decay` must .* got 1.0"),
        (
            lambda: dpoptax.filters.kalman_gain(**GAIN | {"noise_stddev": -1.0}),
            "`noise_stddev` must .* got -1",
        ),
        (
            lambda: dpoptax.filters.kalman_gain(**GAIN, hessian_stddev=1.0),
            "above hessian_stddev",
        ),
    ],
)
def test_bad_arguments(factory, message):
    with pytest.raises((ValueError, TypeError), match=message):
        factory()


def test_default_arguments_are_those_of_papers():
    first, mnist = map(dpoptax.filters.preset, ("doppler-first-order-1", "pmlf-mnist"))
    params, grads = jnp.ones(2), jnp.array([[1.0, -2.0], [3.0, 0.5], [-1.0, 1.0]])

    def run(tx):
        state, out = tx.init(params), []
        for t, g in enumerate(grads):
            updates, state = tx.update(g, state, params + t)
            out.append((updates, dpoptax.gradient_points(state, params).weights))
        return out

    for default, named in (
        (dpoptax.disk(), dpoptax.disk(kappa=0.7, gamma=0.5)),
        (dpoptax.doppler(), dpoptax.doppler(*first)),
        (dpoptax.pmlf(), dpoptax.pmlf(2, 0.1, *mnist)),
    ):
        jax.tree.map(np.testing.assert_array_equal, run(default), run(named))
    for make in (dpoptax.doppler, dpoptax.pmlf):
        with pytest.raises(ValueError, match="must be given with `b`"):
            make(a=[-0.9])
