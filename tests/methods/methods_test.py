"""Tests every method against its paper's pseudo-code: 50 steps, non-convex, given noise."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpoptax
from tests.helpers import slow_but
from tests.oracles import disk as disk_oracle
from tests.oracles import problem
from tests.oracles.doppler import doppler
from tests.oracles.pmlf import pmlf

ETA, PROBLEM = 0.3, problem.make(6)
SGD = {"optimizer_update": disk_oracle.sgd(ETA)}
SILENT = PROBLEM._replace(noise=np.zeros_like(PROBLEM.noise))
UNCLIPPED = 1e6


def _run(method, given=PROBLEM, **options):
    return given.run(method, optax.sgd(ETA), **options)


def _doppler(name):
    b, a = dpoptax.filters.preset(name)
    return dpoptax.doppler(b, a), partial(doppler, eta=ETA, b=b, a=a)


def _disk(kappa, gamma):
    return dpoptax.disk(kappa, gamma), partial(disk_oracle.disk, kappa=kappa, gamma=gamma, **SGD)


def _pmlf(length, beta, name):
    b, a = dpoptax.filters.preset(name)
    oracle = partial(pmlf, eta=ETA, length=length, beta=beta, b=b, a=a)
    return dpoptax.pmlf(length, beta, b, a), oracle


METHODS = {
    "DOPPLER": _doppler("doppler-second-order"),
    "DOPPLER, f5": _doppler("doppler-f5"),
    "DiSK": _disk(0.7, 0.5),
    "DiSK, γ = -1": _disk(0.5, -1.0),
    "DiSK, γ = 2": _disk(0.3, 2.0),
    "DiSK, one gradient": (dpoptax.disk(0.7, None), _disk(0.7, 0.3 / 0.7)[1]),
    "DP-PMLF": _pmlf(4, 0.9, "doppler-second-order"),
    "DP-PMLF, equal weights": _pmlf(3, 1.0, "pmlf-cifar"),
    "DP-PMLF, one iterate": _pmlf(1, 0.5, "none"),
    "DP-PMLF, little weight": _pmlf(2, 0.1, "pmlf-cifar"),
    "DP-PMLF, no weight": _pmlf(5, 0.0, "doppler-second-order"),
}
QUICK = ("DOPPLER", "DiSK", "DiSK, one gradient", "DP-PMLF")


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", slow_but((*QUICK, "DP-PMLF, equal weights"), METHODS))
def test_method_matches_oracle(name):
    method, oracle = METHODS[name]
    want = PROBLEM.solve(oracle, clip_norm=problem.CLIP, noise=PROBLEM.noise)
    problem.assert_same(_run(method), want)


def test_disk_with_one_gradient_has_one_point():
    for method in (dpoptax.disk(0.7, None), dpoptax.disk(1.0, 0.5)):
        points = dpoptax.gradient_points(method.init(jnp.ones(2)), jnp.ones(2))
        assert len(points.points) == 1


@pytest.mark.slow
def test_disk_at_small_gamma_approaches_hessian():
    oracle = partial(
        disk_oracle.disk_hessian, hessian_product=problem.hessian_product, kappa=0.6, **SGD
    )
    want = PROBLEM.solve(oracle, clip_norm=problem.CLIP, noise=PROBLEM.noise)
    np.testing.assert_allclose(_run(dpoptax.disk(0.6, 1e-3)), want, atol=2e-3)


@pytest.mark.slow
def test_disk_with_swapped_gain_differs():
    default, swapped, same = (
        _run(dpoptax.disk(0.7, 0.5, filter_gain=gain)) for gain in (None, 0.3, 0.7)
    )
    assert np.abs(default - swapped).max() > 1e-2
    np.testing.assert_array_equal(default, same)


@pytest.mark.slow
def test_disk_without_noise_and_clipping_is_nesterov():
    x0, u, v, _ = SILENT
    fixed = SILENT._replace(u=np.broadcast_to(u[:1], u.shape), v=np.broadcast_to(v[:1], v.shape))

    def full_gradient(x):
        return np.mean([problem.gradient(x, e) for e in zip(u[0], v[0], strict=True)], axis=0)

    kappa = 0.4
    # In m = η g̃, the filter is Nesterov's momentum 1 - κ with step size ηκ.
    want = disk_oracle.nesterov(
        x0,
        problem.STEPS,
        full_gradient,
        eta=ETA * kappa,
        mu=1 - kappa,
        look_ahead=(1 - kappa) / kappa,
        first=ETA * full_gradient(x0),
    )
    problem.assert_same(_run(dpoptax.disk(kappa, None), fixed, clip=UNCLIPPED), want)


@pytest.mark.slow
def test_disk_at_gamma_minus_one_is_storm():
    want = SILENT.solve(disk_oracle.storm, eta=ETA, alpha=0.6)
    problem.assert_same(_run(dpoptax.disk(0.6, -1.0), SILENT, clip=UNCLIPPED), want)


@pytest.mark.slow
def test_inner_outer_does_not_normalize():
    x, u, v, noise = PROBLEM
    k, beta, momentum = 3, 0.5, 0.8
    outer, window, want = 0.0, [x] * k, [x]
    for t in range(problem.STEPS):
        total = np.zeros_like(x)
        for example in zip(u[t], v[t], strict=True):
            inner = sum(beta**j * problem.gradient(y, example) for j, y in enumerate(window))
            total += inner * min(1.0, problem.CLIP / np.linalg.norm(inner))
        outer = momentum * outer + total / problem.BATCH + noise[t]
        x = x - 0.05 * outer
        window = [x, *window[:-1]]
        want.append(x)
    found = PROBLEM.run(dpoptax.contrib.inner_outer(k, beta, momentum), optax.sgd(0.05))
    problem.assert_same(found, np.stack(want))


GAIN = {"noise_stddev": 1.0, "drift_stddev": 1.0}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: dpoptax.disk(0.0, 0.5), "`kappa` must .* got 0.0"),
        (lambda: dpoptax.disk(1.5, 0.5), "`kappa` must .* got 1.5"),
        (lambda: dpoptax.disk("0.7", 0.5), "`kappa` must be a Python number, got '0.7'"),
        (lambda: dpoptax.disk(0.5, float("nan")), "`gamma` must .* got nan"),
        (lambda: dpoptax.disk(0.5, 0.0), "`gamma` must be finite and not 0, .* such as 0.01"),
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
