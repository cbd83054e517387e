"""Computes threefry-2x32 with 20 rounds, unrolled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpoptax._support.xla import materialize

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA


def threefry(
    key_high: jax.Array, key_low: jax.Array, counters: jax.Array, *, stream: ArrayLike = 0
) -> tuple[jax.Array, jax.Array]:
    """Hashes 64-bit counters whose high word is `stream`.

    `jax.random` hashes only counters with high word 0, except for arrays of more than 2³² elements.
    """
    # Primitives, because every operator of an array takes longer to trace.
    parity = key_high ^ key_low ^ np.uint32(_KEY_PARITY)
    schedule = [jnp.broadcast_to(word, counters.shape) for word in (key_high, key_low, parity)]
    high = schedule[0] + jnp.uint32(stream)
    low = lax.add(counters, schedule[1])
    # Five blocks of four rounds, each followed by an injection of the key.
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            high = lax.add(high, low)
            low = lax.bitwise_xor(rotated(low, rotation), high)
        high = lax.add(high, schedule[(block + 1) % 3])
        low = lax.add(low, lax.add(schedule[(block + 2) % 3], np.uint32(block + 1)))
    return high, low


def rotated(words: jax.Array, bits: int) -> jax.Array:
    """Rotates 32-bit words to the left."""
    left = lax.shift_left(words, np.uint32(bits))
    return lax.bitwise_or(left, lax.shift_right_logical(words, np.uint32(32 - bits)))


def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the key of `jax.random.fold_in`, which takes longer to compile on CPU."""
    data = jax.random.key_data(key)
    # A TPU starts a kernel for each operation on a scalar, so two numbers are hashed.
    numbers = lax.add(number, lax.iota(np.uint32, 2))
    words = jnp.stack(threefry(data[0], data[1], numbers), axis=-1)[0]
    # In a kernel with another hash, these operations would take LLVM minutes to compile.
    stored = materialize(words, jnp.integer)
    return jax.random.wrap_key_data(stored, impl="threefry2x32")


def noise_words(
    key: jax.Array, leaf: ArrayLike, counters: jax.Array, streams: Sequence[int]
) -> list[jax.Array]:
    """Returns two words for each stream, 0 to 7, at every counter of a leaf."""
    high, low = jax.random.key_data(key)
    first = 8 * jnp.uint32(leaf)
    return [word for s in streams for word in threefry(high, low, counters, stream=first + s)]
