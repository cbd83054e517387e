"""Tests that convolutions inside loops are written for XLA's fast kernels on CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import dpoptax

IMAGES = np.random.default_rng(0).normal(size=(6, 8, 8, 2)).astype(np.float32)
SHIFTS = np.linspace(-1, 1, 8, dtype=np.float32)
MASK = np.array([True, True, False, True, True, True])


def network(kernels, image, *, order="NHWC", remat=False, scan=False, **options):
    """Applies two convolutions and a square, so that every gradient contains convolutions."""

    def layer(kernel, x):
        numbers = (order, "HWIO", order)
        x = x + SHIFTS[: x.shape[-1]]  # a constant of the program, also in loops and rematerialized
        return jnp.tanh(lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **options))

    layer = jax.checkpoint(layer) if remat else layer
    x = image[None] if order == "NHWC" else image.transpose(2, 0, 1)[None]
    if scan:
        x, _ = lax.scan(lambda x, kernel: (layer(kernel, x), None), x, jnp.stack(kernels))
    else:
        for kernel in kernels:
            x = layer(kernel, x)
    return jnp.sum(jnp.square(x))


CASES = {
    "plain": dict(window_strides=(1, 1), padding="SAME"),
    "strides": dict(window_strides=(2, 2), padding="SAME"),
    "dilated": dict(window_strides=(1, 1), padding="SAME", rhs_dilation=(2, 1)),
    "groups": dict(window_strides=(1, 1), padding="SAME", feature_group_count=2),
    "channels first": dict(window_strides=(1, 1), padding=((1, 0), (0, 2)), order="NCHW"),
    "rematerialized": dict(window_strides=(1, 1), padding="SAME", remat=True),
    "scanned": dict(window_strides=(1, 1), padding="SAME", scan=True),
}


def kernels_of(options):
    groups = options.get("feature_group_count", 1)
    rng = np.random.default_rng(1)
    return [rng.normal(size=(3, 3, 2 // groups, 2)).astype(np.float32) / 4 for _ in range(2)]


def convolutions(function, *args):
    """Returns the windows and axis orders of the compiled convolutions, and the results."""
    compiled = jax.jit(function).lower(*args).compile()
    written = [line for line in compiled.as_text().splitlines() if " convolution(" in line]
    kinds = [re.findall(r"window={[^}]*}|dim_labels=[^,\s]+", line) for line in written]
    return sorted(kinds), compiled(*args)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_microbatches_use_same_convolutions_as_whole_batch(options):
    kernels, loss = kernels_of(options), functools.partial(network, **options)

    def sums(images, mask):
        losses = jax.vmap(loss, (None, 0))
        return jax.grad(lambda p: jnp.sum(losses(p, images), where=mask))(kernels), None

    found, (total, _) = convolutions(dpoptax.extend.in_microbatches(sums, 2), IMAGES, MASK)
    outside, (expected, _) = convolutions(dpoptax.extend.in_microbatches(sums, None), IMAGES, MASK)
    assert found == outside
    for value, other in zip(total, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["NHWC", "NCHW"])
@pytest.mark.parametrize("method", ["auto", "vmap"])
def test_non_finite_example_leaves_other_groups_finite(method, order):
    kernel = np.linspace(-1, 1, 3 * 3 * 2 * 6, dtype=np.float32).reshape(3, 3, 2, 6)
    images = np.concatenate([IMAGES, IMAGES[::-1]], axis=-1)  # two groups of two channels

    def loss_fn(kernel, image):
        return network([kernel], image, order=order, **CASES["groups"])

    grad_fn = jax.jit(dpoptax.clipped_grad(loss_fn, dpoptax.l2_clip(1.0), method=method))
    points = dpoptax.gradient_points((), kernel)
    bad = images.copy()
    bad[1, 0, 0, 0] = np.nan
    without = np.arange(len(images)) != 1
    expected = grad_fn(points, images, without).sum
    for mask in (np.ones(len(images), bool), without):
        np.testing.assert_array_equal(grad_fn(points, bad, mask).sum, expected)
    assert np.max(np.abs(expected)) > 0.1


def test_program_without_convolutions_is_unchanged():
    def sums(x, mask):
        return jnp.sum(jnp.tanh(x), where=mask[:, None, None, None]), None

    def program(sums):
        return str(jax.make_jaxpr(sums)(IMAGES, MASK))

    assert program(dpoptax.extend.in_microbatches(sums, None)) == program(jax.jit(sums))
