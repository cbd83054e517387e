"""Tests of the oracles against known algorithms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import signal

from tests.oracles import disk, doppler, geodp, lp_adam, pmlf, problem

X0 = np.random.default_rng(9).normal(size=8)
BATCHES = problem.batches(0, steps=12)
NOISE = 0.1 * np.random.default_rng(1).normal(size=(12, 8))
SILENT = np.zeros_like(NOISE)
FIRST_ORDER = {"b": (1 / 11, 1 / 11), "a": (-9 / 11,)}


def dp_sgd(eta, clip_norm, noise):
    return doppler.doppler(
        X0, BATCHES, problem.gradient, eta=eta, clip_norm=clip_norm, b=(1.0,), a=(), noise=noise
    )


def full_gradient(batch):
    return lambda x: np.mean([problem.gradient(x, example) for example in batch], axis=0)


def test_problem_derivatives_match_loss():
    z, y = problem.as_arrays(BATCHES[0])
    x, d = jnp.asarray(X0, jnp.float32), jnp.arange(8.0)
    for example, zi, yi in zip(BATCHES[0], z, y, strict=True):
        gradient = functools.partial(jax.grad(problem.loss_fn), example=(zi, yi))
        value, product = jax.jvp(gradient, (x,), (d,))
        np.testing.assert_allclose(value, problem.gradient(X0, example), atol=1e-5)
        expected = problem.hessian_product(X0, example, np.arange(8.0))
        np.testing.assert_allclose(product, expected, atol=1e-4)


def test_doppler_filters_like_scipy():
    """Reconstructs the filter's output from the iterates, and its input by filtering again."""
    inputs, outputs = [], []
    recorded = []

    def gradient(x, example):
        recorded.append(problem.gradient(x, example))
        return recorded[-1]

    x = doppler.doppler(
        X0, BATCHES, gradient, eta=0.5, clip_norm=np.inf, noise=NOISE, **FIRST_ORDER
    )
    size = len(BATCHES[0])
    inputs = np.array(recorded).reshape(12, size, 8).mean(axis=1) + NOISE
    outputs = -np.diff(x, axis=0) / 0.5
    b, a = FIRST_ORDER["b"], (1.0, *FIRST_ORDER["a"])
    expected = signal.lfilter(b, a, inputs, axis=0) / signal.lfilter(b, a, np.ones((12, 1)), axis=0)
    np.testing.assert_allclose(outputs, expected, atol=1e-12)


def test_clipping_bounds_a_step():
    x = dp_sgd(1.0, 1e-3, SILENT)
    assert np.linalg.norm(np.diff(x, axis=0), axis=1).max() <= 1e-3 * (1 + 1e-12)


def test_pmlf_uses_the_current_examples_at_past_iterates():
    x = pmlf.pmlf(
        X0,
        BATCHES,
        problem.gradient,
        eta=0.3,
        clip_norm=np.inf,
        length=3,
        beta=0.5,
        b=(1.0,),
        a=(),
        noise=SILENT,
    )
    weights = np.array([1, 0.5, 0.25]) / 1.75
    expected = sum(w * full_gradient(BATCHES[7])(x[7 - i]) for i, w in enumerate(weights))
    np.testing.assert_allclose((x[7] - x[8]) / 0.3, expected)


@pytest.mark.parametrize("gamma", [0.5, -1.0, 3.0])
def test_disk_with_full_gain_is_dp_sgd(gamma):
    actual = disk.disk(
        X0,
        BATCHES,
        problem.gradient,
        kappa=1.0,
        gamma=gamma,
        optimizer_update=disk.sgd(0.3),
        clip_norm=0.5,
        noise=NOISE,
    )
    np.testing.assert_allclose(actual, dp_sgd(0.3, 0.5, NOISE))


def test_disk_variants_agree():
    common = {
        "kappa": 0.7,
        "optimizer_update": disk.sgd(0.3),
        "clip_norm": 0.5,
        "noise": NOISE,
    }
    full = functools.partial(disk.disk, X0, BATCHES, problem.gradient, **common)
    one = disk.disk_one_gradient(X0, BATCHES, problem.gradient, **common)
    np.testing.assert_allclose(full(gamma=0.3 / 0.7), one, atol=1e-12)
    exact = disk.disk_hessian(X0, BATCHES, problem.gradient, problem.hessian_product, **common)
    np.testing.assert_allclose(full(gamma=1e-6), exact, atol=1e-7)
    assert np.abs(full(gamma=1.0) - exact).max() > 1e-4


def test_lp_adam_projects_matrices_to_low_rank_and_back():
    rng = np.random.default_rng(3)
    targets = [[(rng.normal(size=(5, 4)),) for _ in range(3)] for _ in range(6)]
    x = lp_adam.lp_adam(
        np.zeros((5, 4)),
        targets,
        lambda x, example: x - example[0],
        eta=0.1,
        clip_norm=1.0,
        b=(0.5,),
        a=(-0.5,),
        beta=0.1,
        eps=1e-8,
        noise=np.zeros((6, 5, 4)),
        rank=2,
        interval=3,
    )
    steps = np.diff(x, axis=0)
    assert [np.linalg.matrix_rank(step, tol=1e-9) for step in steps] == [2] * 6
    # The column space is constant between two projections.
    assert np.linalg.matrix_rank(np.hstack(steps[:3]), tol=1e-9) == 2
    assert np.linalg.matrix_rank(np.hstack(steps), tol=1e-9) == 4


def test_geodp_without_noise_is_clipped_sgd():
    gradients = np.stack([problem.gradient(X0, example) for example in BATCHES[0]])
    w = geodp.geodp_step(
        X0, gradients, clip_norm=0.5, beta=1.0, learning_rate=0.3, noise=np.zeros(8)
    )
    np.testing.assert_allclose(w, dp_sgd(0.3, 0.5, SILENT)[1], atol=1e-12)
