"""Tests of the order in which blocks are added."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpoptax._rounding import block_sums


@pytest.mark.parametrize("stored", [1, 3, 7, 100])
@pytest.mark.parametrize("count", [2, 3, 8, 13])
def test_chunks_have_the_sum_of_all_blocks(count, stored, monkeypatch):
    monkeypatch.setattr(block_sums, "_GPU_ENTRIES", 4 * stored)
    x = np.random.default_rng(0).normal(size=(count, 5, 4)).astype(np.float32)
    add = lambda x: block_sums._sum_in_chunks(lambda b: b.sum(0), jnp.zeros(4), x)  # noqa: E731
    np.testing.assert_allclose(jax.jit(add)(x), x.sum((0, 1), np.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("entries", [1, 2, 5, 1000])
def test_a_chunk_has_at_most_two_thirds_of_the_blocks(entries, monkeypatch):
    """The bound of three batches in the sums above blocks assumes this."""
    monkeypatch.setattr(block_sums, "_GPU_ENTRIES", 24)
    for count in range(2, 60):
        length = block_sums._chunk_length(count, entries)
        assert length * entries <= max(24, entries)
        assert length == count or 3 * length <= 2 * count + (count == 2)
