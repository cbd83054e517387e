"""Derives keys from seeds and from other keys.

No two uses hash the same bytes. Here, a secret of 8 or 32 bytes comes first, then a text without
zero bytes. Each use has its own length: 37, 50, 56, 72 or 96 bytes. `fingerprints` and `seeded`
begin with a label, whose zero byte is after byte 32. `sweep` hashes decimal digits, a space and a
word, and `trials` longer JSON. Stored runs rest on each form, so none may change.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax.runs import Generator, key_of_words, number_of_words, words_of
from dpoptax.training.errors import ConfigError


def key_of(seed: int, generator: Generator) -> jax.Array:
    """Returns the noise key of a seed, for runs that are repeated.

    `jax.random.key(seed)` uses only the lower 32 bits, which an adversary could search.

    Raises:
        ConfigError: The seed is negative or too large.
    """
    return _key(seed, b"noise", number_of_words(generator))


def params_key(seed: int | None) -> jax.Array:
    """Returns the key of initial parameters, of which a large seed's noise key is independent.

    Raises:
        ConfigError: As for `key_of`.
    """
    if seed is None or 0 <= seed < 2**32:
        return jax.random.key(seed or 0)
    return _key(seed, b"initial parameters", 2)


def _key(seed: int, use: bytes, words: int) -> jax.Array:
    """Hashes a seed to a key for one use."""
    if not 0 <= seed < 2**256:
        raise ConfigError(f"`seed` must be from 0 to 2**256 - 1, got {seed}.")
    return hashed_key(seed.to_bytes(32, "big") + use, words)


def hashed_key(secret: bytes, words: int = 2) -> jax.Array:
    """Hashes a secret to a key of this many words, of which the other keys are independent."""
    return key_of_words(np.frombuffer(hashlib.shake_256(secret).digest(4 * words), np.uint32))


def random_key(noise: jax.Array) -> jax.Array:
    """Derives the key of losses with randomness from a noise key of either generator."""
    if jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
        return jax.random.fold_in(noise, 2**32 - 1)  # the steps fold in smaller numbers
    text = words_of(noise) + b"random numbers of losses"
    return jax.random.wrap_key_data(
        jnp.asarray(np.frombuffer(hashlib.shake_256(text).digest(8), np.uint32))
    )


def derived_key(key: jax.Array, read: str) -> jax.Array:
    """Derives the noise key of a run that reads the inputs with this hash.

    Runs with one key and different hashes have independent keys. A key of either generator gives
    one of the same generator.
    """
    words = words_of(key)
    return hashed_key(words + read.encode(), len(words) // 4)
