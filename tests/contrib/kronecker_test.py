"""Tests of Kronecker factors from public probes, and of their effect on gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import dpoptax
from tests.helpers import floats, mlp_batch, mlp_loss, mlp_params


def _root(moment, damping):
    moment = np.asarray(moment, np.float64) / np.trace(moment) * len(moment)
    values, vectors = np.linalg.eigh(moment)
    return (vectors * ((values + damping) / (1 + damping)) ** -0.5) @ vectors.T


def test_factors_are_inverse_roots_of_second_moments():
    params, (x, y) = mlp_params(0), mlp_batch(0, 30)
    find = functools.partial(dpoptax.contrib.kronecker_factors, mlp_loss, damping=0.2)
    found = jax.jit(find)(params, (x, y))
    x, (first, last) = np.float64(x), jax.tree.map(np.float64, params)
    inputs = np.tanh(x @ first["w"] + first["b"])
    outputs = special.softmax(inputs @ last["w"] + last["b"], axis=1) - np.eye(3)[y]
    hidden = (outputs @ last["w"].T) * (1 - inputs**2)
    for layer, a, e in ((0, x, hidden), (1, inputs, outputs)):
        sides = found[layer]["w"]
        np.testing.assert_allclose(sides.rows, _root(a.T @ a, 0.2), atol=2e-4)
        np.testing.assert_allclose(sides.columns, _root(e.T @ e, 0.2), atol=2e-4)
        np.testing.assert_allclose(
            sides.rows @ sides.rows_inverse, np.eye(len(sides.rows)), atol=1e-4
        )
        # The inverse map preserves the power of the noise of a kernel.
        power = np.sum(np.square(sides.rows_inverse)) / len(sides.rows)
        np.testing.assert_allclose(power, 1.0, rtol=1e-4)
    assert isinstance(found[0]["b"], dpoptax.extend.Diagonal)


def test_rows_of_convolution_follow_kernel_order():
    rng = np.random.default_rng(0)
    kernel = floats(np.zeros((3, 2, 4)))
    x = floats(rng.normal(size=(40, 8, 2)) * [1.0, 5.0])
    d = floats(rng.normal(size=(40, 8, 4)) * [1.0, 2.0, 3.0, 4.0])

    def loss(kernel, example):
        x, d = example
        numbers = ("NWC", "WIO", "NWC")
        out = jax.lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=numbers)
        return jnp.sum(out[0] * d)

    find = functools.partial(dpoptax.contrib.kronecker_factors, loss, damping=0.1)
    sides = jax.jit(find)(kernel, (x, d))
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    patches = np.concatenate([padded[:, t : t + 3].reshape(40, 6) for t in range(8)])
    np.testing.assert_allclose(sides.rows, _root(patches.T @ patches, 0.1), atol=2e-4)
    derivatives = np.asarray(d).reshape(-1, 4)
    want = _root(derivatives.T @ derivatives, 0.1)
    np.testing.assert_allclose(sides.columns, want, atol=2e-4)


@pytest.mark.slow
def test_lookup_tables_stay_diagonal_under_factors():
    params = {"table": jnp.ones((7, 3)), "w": jnp.ones((3, 2))}

    def loss(params, token):
        return jnp.sum(jnp.sin(params["table"][token] @ params["w"]) * jnp.arange(2))

    found = jax.jit(lambda p: dpoptax.contrib.kronecker_factors(loss, p, jnp.arange(7)))(params)
    assert isinstance(found["table"], dpoptax.extend.Diagonal)
    assert isinstance(found["w"], dpoptax.extend.Sides)
    tx = dpoptax.extend.linear_map(
        lambda p: dpoptax.contrib.kronecker_factors(loss, p, jnp.arange(7)), every=2, back=False
    )
    state = jax.jit(tx.init)(params)
    _, state = jax.jit(tx.update)(params, state, params)
    points = dpoptax.gradient_points(state, params)
    clipped = dpoptax.clipped_grad(loss, dpoptax.l2_clip(1.0))(points, jnp.arange(7))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clipped.sum))


def test_damping_must_be_positive():
    with pytest.raises(ValueError, match=r"`damping` must .* got 0\.0"):
        dpoptax.contrib.kronecker_factors(mlp_loss, mlp_params(0), mlp_batch(0, 2), damping=0.0)
