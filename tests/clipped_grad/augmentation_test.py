"""Tests augmentation multiplicity: the copies of an example are averaged before clipping."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._clipped_sum.clip_per_example import sum_clipped
from tests import helpers

pytestmark = pytest.mark.usefixtures("no_room")

KEY = jax.random.key(0)


def _jitter(example, key):
    x, y = example
    return x + 0.5 * jax.random.normal(key, x.shape), y


@pytest.mark.parametrize(
    ("microbatch_size", "method"),
    [
        (4, "auto"),
        pytest.param(None, "vmap", marks=pytest.mark.slow),
        pytest.param(None, "auto", marks=pytest.mark.slow),
        pytest.param(4, "vmap", marks=pytest.mark.slow),
    ],
)
def test_copies_are_averaged_before_clipping(method, microbatch_size):
    params, batch = helpers.mlp_params(0), helpers.mlp_batch(0, 6)
    clip = dpoptax.l2_clip(0.2)
    grad_fn = dpoptax.clipped_grad(
        dpoptax.augmented(helpers.mlp_loss, _jitter, 3),
        clip,
        microbatch_size=microbatch_size,
        method=method,
    )
    points = dpoptax.gradient_points((), params)
    got = jax.jit(grad_fn)(points, batch, key=KEY, ids=np.arange(6)).sum
    gradient = jax.jit(lambda *of: jax.grad(helpers.mlp_loss)(params, _jitter(*of)))
    means = []
    for i in range(6):
        example = jax.tree.map(lambda x, i=i: np.asarray(x)[i], batch)
        keys = jax.random.split(jax.random.fold_in(KEY, i), 3)
        copies = [gradient(example, key) for key in keys]
        means.append(jax.tree.map(lambda *g: sum(map(np.asarray, g)) / np.float32(3), *copies))
    want = jax.jit(functools.partial(sum_clipped, clip))(
        jax.tree.map(lambda *g: np.stack(g), *means)
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6), got, want)


def test_aux_contains_all_copies():
    loss_fn = dpoptax.augmented(
        lambda w, x: (jnp.sum(w * x), x[0]),
        lambda x, key: x + jax.random.uniform(key),
        5,
        has_aux=True,
    )
    grad_fn = dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0), has_aux=True)
    points = dpoptax.gradient_points((), jnp.zeros(2))
    _, aux = jax.jit(grad_fn)(points, jnp.arange(6.0).reshape(3, 2), key=KEY, ids=jnp.arange(3))
    assert aux.shape == (3, 5)
    assert len(np.unique(aux)) == 15
    np.testing.assert_array_equal(np.floor(aux), np.array([[0.0], [2.0], [4.0]]) * np.ones(5))


@pytest.mark.parametrize("multiplicity", [0, -1, 2.0])
def test_bad_multiplicity(multiplicity):
    with pytest.raises(ValueError, match=f"`multiplicity` must .* got {multiplicity}"):
        dpoptax.augmented(helpers.mlp_loss, _jitter, multiplicity)
