"""Derives keys and sampler seeds from the seed of a run."""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Keys(NamedTuple):
    """Keys of the steps of a run.

    Attributes:
        noise: The noise key: a typed threefry key, or a ChaCha20 key.
        random: The key of losses with randomness, a typed key.
    """

    noise: jax.Array
    random: jax.Array

    @classmethod
    def of(cls, noise: jax.Array) -> "Keys":
        """Returns keys with a threefry noise key and a key derived from it."""
        return cls(noise, jax.random.fold_in(noise, 2**32 - 1))  # the steps fold in smaller numbers

    @classmethod
    def fixed(cls, generator: str) -> "Keys":
        """Returns constant keys, for callers that fold their own keys into them."""
        found = cls.of(jax.random.key(0))
        ciphered = generator == "chacha20"
        return found._replace(noise=jnp.zeros(8, jnp.uint32)) if ciphered else found


def keys(seed: int, generator: str) -> tuple[jax.Array, Keys]:
    """Derives the key of the initial parameters and the keys of the steps from a seed."""
    if generator == "chacha20":
        uses = "parameters", "random numbers of losses"
        first, random = (jax.random.wrap_key_data(_words(seed, use)[:2]) for use in uses)
        return first, Keys(_words(seed, "noise"), random)
    words = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
    return _split(words)


def random_key(noise: jax.Array) -> jax.Array:
    """Derives the key of losses with randomness from a noise key of either generator."""
    if jnp.issubdtype(noise.dtype, jax.dtypes.prng_key):
        return Keys.of(noise).random
    seed = int.from_bytes(np.asarray(noise).tobytes())
    return jax.random.wrap_key_data(_words(seed, "random numbers of losses")[:2])


def noise_key_of(key: jax.Array, read: str) -> jax.Array:
    """Derives the noise key of a run that reads the inputs with this hash.

    Runs with one key and different inputs have independent keys. A key of either generator gives
    one of the same generator.
    """
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(key) if typed else key)
    derived = hashlib.shake_256(words.tobytes() + read.encode()).digest(words.nbytes)
    found = jnp.asarray(np.frombuffer(derived, np.uint32))
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(key)) if typed else found


def of_batches(seed: int, generator: str) -> int | bytes:
    """Derives the seed of the sampler."""
    return derived(seed, "batches") if generator == "chacha20" else seed


def of_records(seed: int, generator: str) -> int:
    """Derives the NumPy seed that draws which records of a user take part.

    It need not be secret. With ciphers it is a hash of the run's seed, because an adversary who
    knows a user's records may learn bits of it from the releases.
    """
    return int.from_bytes(derived(seed, "records")) if generator == "chacha20" else seed


def derived(seed: int, use: str) -> bytes:
    """Derives 256 bits for a use. They do not reveal the seed or bits of other uses."""
    return hashlib.shake_256(seed.to_bytes(32, "big") + use.encode()).digest(32)


def _words(seed: int, use: str) -> jax.Array:
    return jnp.asarray(np.frombuffer(derived(seed, use), np.uint32))


@jax.jit
def _split(words: jax.Array) -> tuple[jax.Array, Keys]:
    high, low = words
    # `jax.random.key(seed)` uses only the lower 32 bits, which an adversary could search. Seeds
    # below 2**32 give the same key as there.
    key = jax.random.key(low)
    first, noise = jax.random.split(jnp.where(high == 0, key, jax.random.fold_in(key, high)))
    return first, Keys.of(noise)
