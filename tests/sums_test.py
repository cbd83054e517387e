"""Sums over examples: in blocks, in pairs, and with what rounding takes off."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpoptax
from dpoptax._clips import sums
from tests.helpers import floats


@pytest.mark.parametrize("size", [1, 31, 32, 33, 64, 96, 140, 283, 1000, 4099])
def test_a_sum_in_blocks_has_every_term_once(size):
    weights = np.arange(size) % 7 - 3.0
    values = np.stack([np.arange(size) % 5, np.ones(size)], axis=1)  # all sums are exact
    found = jax.jit(sums.weighted)(floats(weights), floats(values))
    np.testing.assert_array_equal(found, weights @ values)


def test_an_example_changes_the_rounding_of_its_block_and_of_few_sums_above():
    """Added one after the other, what is lost behind the largest would come back: 0.5 of 1."""
    values = np.full(4096, 2.0**-25, np.float32)
    values[0] = 1.0
    with_it, without = (jax.jit(sums.weighted)(floats(w), floats(values)) for w in _weights(4096))
    assert abs(float(with_it) - float(without) - 1.0) <= 32 * 2.0**-24


def _weights(size):
    return np.ones(size), np.arange(size) > 0


def test_what_an_addition_loses_is_found_in_compiled_programs():
    a, b = np.random.default_rng(0).normal(size=(2, 1000)) * 2.0 ** np.arange(-30, 30, 0.06)[:1000]
    a, b = floats(a), floats(b[::-1])
    total, lost = jax.jit(sums.add)(a, b)
    exact = np.float64(a) + np.float64(b)
    np.testing.assert_array_equal(np.float64(total) + np.float64(lost), exact)
    assert np.any(np.asarray(lost) != 0)


def test_many_microbatches_round_as_one_addition():
    values = floats(np.concatenate([[1.0], np.full(999, 2.0**-25)]))
    total = jax.jit(dpoptax.in_microbatches(lambda x, mask: (jnp.sum(x, where=mask), None), 1))
    found, _ = total(values, np.ones(1000, bool))
    assert float(found) == np.float32(1 + 999 * 2.0**-25)
