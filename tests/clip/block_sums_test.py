"""Tests of the order in which blocks are added."""

import itertools

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
    in_levels = lambda x: block_sums._sum_in_levels(x.sum(1), itertools.repeat(2))  # noqa: E731
    add = lambda x: block_sums._sum_in_chunks(in_levels, jnp.zeros(4), x)  # noqa: E731
    np.testing.assert_allclose(jax.jit(add)(x), x.sum((0, 1), np.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("entries", [1, 2, 5, 1000])
def test_a_chunk_has_at_most_two_thirds_of_the_blocks(entries, monkeypatch):
    """The bound of three batches in the sums above blocks assumes this."""
    monkeypatch.setattr(block_sums, "_GPU_ENTRIES", 24)
    for count in range(2, 60):
        length = block_sums._chunk_length(count, entries)
        assert length * entries <= max(24, entries)
        assert length == count or 3 * length <= 2 * count + (count == 2)


@pytest.mark.parametrize("largest_summand", [1.0, 32.0])
@pytest.mark.parametrize("block", [1, 5, 32, 256])
def test_bound_covers_all_orders_of_sums_of_blocks(block, largest_summand):
    """Adds the examples in all sums that include one, for every size up to that of the batch."""
    batch = 1500
    bound = block_sums._rounding_above(batch, block, largest_summand)
    unit = block_sums.TWO_ROUNDINGS * largest_summand
    for size in range(block + 1, batch + 1, 7):
        lengths = (n for n in range(block, block // 4 - 1, -1) if n and size % n == 0)
        length = next(lengths, block)
        count = -(-size // length)
        assert unit * _changed_in_levels(count, length, size, block, largest_summand) <= bound
        loop = block_sums._loop_rounding(count, size, largest_summand)
        plain = loop <= block_sums._LEVEL_LIMIT or count <= block_sums._PLAIN_SUMS
        turns = sum(min(j * length, size) for j in range(2, count + 1)) if plain else size
        assert unit * turns <= bound
        for stored in (2, 3, 10):
            chunk = -(-count // -(-count // stored))
            if chunk < count:
                inside = min(size, chunk * length)
                of_chunk = _changed_in_levels(chunk, length, inside, block, largest_summand)
                assert unit * (of_chunk + size) <= bound


def _changed_in_levels(count, length, size, block, largest_summand):
    """Returns Σ (n − 1) · examples over the sums of n results that include an example."""
    total, lengths = 0, block_sums._level_lengths(block, largest_summand)
    while count > 1:
        sums = -(-count // next(lengths))
        terms = -(-count // sums)
        length = min(size, length * terms)
        total += (terms - 1) * length
        count = -(-count // terms)
    return total
