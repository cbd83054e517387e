"""Derives keys and the seeds of samplers from the seed of a run."""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Keys(NamedTuple):
    """The keys of a run's steps.

    Attributes:
        noise: A typed key of threefry, or one of ChaCha20.
        random: For losses with randomness, a typed key.
    """

    noise: jax.Array
    random: jax.Array

    @classmethod
    def of(cls, noise: jax.Array) -> "Keys":
        """Returns keys with a threefry key for the noise, and one derived from it."""
        return cls(noise, jax.random.fold_in(noise, 2**32 - 1))  # there are not so many steps

    @classmethod
    def fixed(cls, generator: str) -> "Keys":
        """Returns keys of zeros, for callers that fold their keys into them."""
        found = cls.of(jax.random.key(0))
        ciphered = generator == "chacha20"
        return found._replace(noise=jnp.zeros(8, jnp.uint32)) if ciphered else found


def keys(seed: int, generator: str) -> tuple[jax.Array, Keys]:
    """Derives the key of the parameters and those of the steps from all bits of a seed."""
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


def bits(generator: str) -> int:
    """Returns the number of bits of a drawn seed."""
    return 256 if generator == "chacha20" else 63


def of_batches(seed: int, generator: str) -> int | bytes:
    """Returns the seed of the sampler."""
    return derived(seed, "batches") if generator == "chacha20" else seed


def of_records(seed: int, generator: str) -> int:
    """Returns the seed that draws, by NumPy's generator, which of a user's records take part.

    It need not be secret. But it must not reveal the seed of a cipher, because an adversary who
    knows a user's records may find bits of it in the releases.
    """
    return int.from_bytes(derived(seed, "records")) if generator == "chacha20" else seed


def derived(seed: int, use: str) -> bytes:
    """Derives 256 bits for a use, which reveal neither the seed nor those of another use."""
    return hashlib.shake_256(seed.to_bytes(32, "big") + use.encode()).digest(32)


def _words(seed: int, use: str) -> jax.Array:
    return jnp.asarray(np.frombuffer(derived(seed, use), np.uint32))


@jax.jit
def _split(words: jax.Array) -> tuple[jax.Array, Keys]:
    high, low = words
    # `jax.random.key(seed)` would take the lower 32 bits only, which an adversary could try out.
    # A seed of 32 bits gives the same key.
    key = jax.random.key(low)
    first, noise = jax.random.split(jnp.where(high == 0, key, jax.random.fold_in(key, high)))
    return first, Keys.of(noise)
