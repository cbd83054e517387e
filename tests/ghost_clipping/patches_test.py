"""Tests that patches of convolutions that are joined axis by axis have the right order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dpoptax._losses.rules import Convolution

CASES = {
    "plain": ((7, 6), (3, 2), {}),
    "strides": ((8, 9), (3, 3), {"window_strides": (2, 3), "padding": ((1, 0), (2, 1))}),
    "dilated": (
        (9, 8),
        (2, 3),
        {"rhs_dilation": (3, 2), "lhs_dilation": (1, 2), "padding": ((0, 0),) * 2},
    ),
    "groups": ((5, 5), (3, 3), {"feature_group_count": 2}),
    "one axis": ((9,), (4,), {"window_strides": (2,), "padding": ((1, 2),)}),
    "three axes": ((4, 5, 6), (2, 1, 3), {"feature_group_count": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_patches_by_axis_are_those_of_all_offsets(name):
    spatial, kernel, options = CASES[name]
    options = {"window_strides": (1,) * len(kernel), "padding": "VALID"} | options
    features, groups = 4, options.get("feature_group_count", 1)
    x = np.random.default_rng(0).normal(size=(2, features, *spatial)).astype(np.float32)
    weights = jnp.ones((8, features // groups, *kernel))

    def convolve(x, weights):
        return lax.conv_general_dilated(x, weights, **options)

    (eqn,) = jax.make_jaxpr(convolve)(x, weights).eqns
    out = eqn.outvars[0].aval.shape[2:]
    rule = Convolution.build(eqn, 1)
    together = jnp.concatenate(rule._shifts(x, out), axis=2)
    np.testing.assert_array_equal(rule._patches(x, out), together)
    assert together.shape[1] == groups
