"""Tests that the gradient of max-pooling matches XLA's scatter bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpoptax

CASES = {
    "2x2": dict(window=(2, 2), strides=(2, 2), padding="VALID"),
    "2x2, padded below": dict(window=(2, 2), strides=(2, 2), padding="SAME"),
    "3x2, padded around": dict(window=(3, 2), strides=(3, 2), padding=((2, 1), (1, 0))),
    "gaps": dict(window=(2, 1), strides=(3, 2), padding="VALID"),
    "minimum": dict(window=(2, 2), strides=(2, 2), padding="SAME", least=True),
    "overlapping": dict(window=(3, 3), strides=(2, 2), padding="SAME"),
}
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0], np.float32)


def pooled(image, window, strides, padding, least=False):
    start, better = (jnp.inf, lax.min) if least else (-jnp.inf, lax.max)
    return lax.reduce_window(image, start, better, window, strides, padding)


def gradients(case, microbatch_size):
    """Returns per-image gradients of the pooled outputs, each output with a different weight."""

    def sums(images, mask):
        def loss(image):
            out = pooled(image, **case)
            return jnp.sum(out * jnp.arange(1.0, 1 + out.size).reshape(out.shape))

        return jnp.sum(mask), jax.vmap(jax.grad(loss))(images)

    return dpoptax.extend.in_microbatches(sums, microbatch_size)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_selects_same_entries_as_xla(case):
    rng = np.random.default_rng(0)
    images = [
        rng.normal(size=(6, 7, 9)),
        rng.integers(0, 2, (6, 7, 9)),  # most windows have several maxima
        rng.choice(SPECIAL, (6, 7, 9)),
        np.full((6, 7, 9), -np.inf),
    ]
    images = jnp.asarray(np.concatenate(images).astype(np.float32))
    mask = jnp.ones(len(images), bool)
    weighed = lambda image: jax.vjp(lambda x: pooled(x, **case), image)  # noqa: E731

    def by_xla(image):
        out, back = weighed(image)
        return back(jnp.arange(1.0, 1 + out.size).reshape(out.shape))[0]

    (_, found), expected = (
        jax.jit(gradients(case, 8))(images, mask),
        jax.jit(jax.vmap(by_xla))(images),
    )
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.jit(gradients(case, None))(images, mask)[1], expected)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_overlapping_windows_use_scatter(case):
    images, mask = jnp.zeros((16, 7, 9)), jnp.ones(16, bool)
    text = jax.jit(gradients(case, 8)).lower(images, mask).as_text()
    assert ("select_and_scatter" in text) == (case is CASES["overlapping"])
