"""Tests that arithmetic in limbs equals Python's integers."""

import jax
import numpy as np
import pytest

from dpoptax._rounding import wide_integers


def _value(x):
    """Returns wide integers (8, …) as Python integers."""
    return sum(np.asarray(limb).astype(object) << (16 * i) for i, limb in enumerate(x))


@pytest.mark.parametrize("size", [0, 1, 5, 8192, 8193, 70_000])
@pytest.mark.parametrize("largest", [3, 1000, 2**31 - 1])
def test_sums_of_squares_are_exact(size, largest):
    x = np.random.default_rng(size).integers(-largest, largest + 1, (3, size)).astype(np.int32)
    x[0], x[1] = -(2**31), 2**31 - 1
    got = jax.jit(wide_integers.sum_of_squares)(x)
    np.testing.assert_array_equal(_value(got), (x.astype(object) ** 2).sum(-1))


def test_products_totals_and_comparisons_are_exact():
    rng = np.random.default_rng(0)
    rows, columns = (
        wide_integers.sum_of_squares(rng.integers(-n, n, (40, 3000)).astype(np.int32))
        for n in (2**7, 2**15)
    )
    product = wide_integers.multiply(rows, columns)
    want = _value(rows) * _value(columns)
    np.testing.assert_array_equal(_value(product), want)
    assert _value(wide_integers.total(product)) == sum(want)
    for off in (-1, 0, 1, 2**70):
        bound = np.stack([wide_integers.constant(max(0, int(x) + off)) for x in want], axis=1)
        np.testing.assert_array_equal(wide_integers.at_most(product, bound), off >= 0)
    bound = np.broadcast_to(wide_integers.constant(int(want[0]))[:, None], product.shape)
    np.testing.assert_array_equal(wide_integers.at_most(product, bound), want <= want[0])


@pytest.mark.parametrize("largest", [3, 2**15, 2**31 - 1])
def test_inner_products_are_exact(largest):
    a, b = np.random.default_rng(0).integers(-largest, largest + 1, (2, 3, 9000)).astype(np.int32)
    a[0], b[1] = -(2**31), -(2**31)
    positive, negative = map(_value, jax.jit(wide_integers.inner_products)(a, b))
    products = a.astype(object) * b
    np.testing.assert_array_equal(positive, np.where(products > 0, products, 0).sum(-1))
    np.testing.assert_array_equal(positive - negative, products.sum(-1))
