"""Tests that the hash of all noise, and the keys of its steps, agree with JAX's threefry."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import random as jex_random

from dpoptax._random import threefry
from dpoptax._support.xla import places


@pytest.mark.parametrize("stream", [0, 1, 4])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_hashes_like_jax(stream, seed):
    data = jax.random.key_data(jax.random.fold_in(jax.random.key(3), np.uint32(seed)))
    counters = np.array([0, 1, 12345, 2**32 - 1], np.uint32)
    found = threefry.threefry(data[0], data[1], jnp.asarray(counters), stream=stream)
    both = jnp.asarray(np.concatenate([np.full_like(counters, stream), counters]))
    want = jex_random.threefry_2x32(data, both)
    np.testing.assert_array_equal(np.concatenate(found), want)


@pytest.mark.parametrize("partitionable", [True, False])
def test_derives_keys_like_jax(partitionable):
    key, numbers = jax.random.key(2), np.array([0, 1, 69, 2**32 - 1], np.uint32)
    with jax.threefry_partitionable(partitionable):
        found = jax.vmap(lambda n: threefry.fold_in(key, n))(numbers)
    want = jax.random.key_data(jax.vmap(lambda n: jax.random.fold_in(key, n))(numbers))
    np.testing.assert_array_equal(jax.random.key_data(found), want)


def test_places_count_in_row_major_order():
    np.testing.assert_array_equal(places((2, 1, 3)), np.arange(6, dtype=np.uint32).reshape(2, 1, 3))
    assert places(()) == 0
