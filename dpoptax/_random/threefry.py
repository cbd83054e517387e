"""Computes threefry-2x32 with 20 rounds, unrolled."""

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._support.xla import materialize

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_KEY_PARITY = 0x1BD11BDA


def threefry(
    key_high: jax.Array, key_low: jax.Array, counters: jax.Array, *, stream: int = 0
) -> tuple[jax.Array, jax.Array]:
    """Hashes 64-bit counters whose high word is `stream`.

    `jax.random` hashes only counters with high word 0, except for arrays of more than 2³² elements.
    """
    schedule = (key_high, key_low, key_high ^ key_low ^ np.uint32(_KEY_PARITY))
    high = jnp.broadcast_to(key_high + np.uint32(stream), counters.shape)
    low = counters + key_low
    # Five blocks of four rounds, each followed by an injection of the key.
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            high += low
            low = rotated(low, rotation) ^ high
        high += schedule[(block + 1) % 3]
        low += schedule[(block + 2) % 3] + np.uint32(block + 1)
    return high, low


def rotated(words: jax.Array, bits: int) -> jax.Array:
    """Rotates 32-bit words to the left."""
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def split(key: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Returns a key for each number, (n,).

    The bits are those of `jax.random.fold_in`, which takes longer to compile on CPU.
    """
    data = jax.random.key_data(key)
    words = threefry(data[0], data[1], jnp.asarray(numbers, jnp.uint32))
    # In a kernel with another hash, these operations would take LLVM minutes to compile.
    stored = materialize(jnp.stack(words, axis=-1), jnp.integer)
    return jax.random.wrap_key_data(stored, impl="threefry2x32")
