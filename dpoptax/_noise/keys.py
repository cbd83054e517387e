"""Keys of noise, and those that no one can guess."""

import os

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._keys import check_key

_IMPL = "threefry2x32"


def random_key_from_os() -> jax.Array:
    """Returns a threefry key of 64 random bits from the operating system's generator.

    `jax.random.key(seed)` makes one of 2³² keys unless 64-bit types are enabled, and people choose
    few of those: an attacker who tries them all, or finds the seed in a config, subtracts the
    noise. This answers that threat: the key is as unpredictable as 64 bits can be. A run with it
    cannot be repeated; the key is in the optimizer's state, so keep checkpoints as secret as the
    data.

    It does not answer an attacker who can try 2⁶⁴ keys. And it makes no cryptographic generator of
    threefry-2x32, which derives each step's noise from the key: no break of its 20 rounds is known,
    but it was made for simulation, with a 64-bit key, and has had little cryptanalysis. Where a
    proof must rest on a cryptographic generator, draw the noise outside JAX.

    Raises:
      RuntimeError: in a process of several, each of which would draw another key.

    >>> key = random_key_from_os()
    >>> key.shape, str(jax.random.key_impl(key))
    ((), 'threefry2x32')
    """
    if jax.process_count() > 1:
        raise RuntimeError(
            f"each of these {jax.process_count()} processes would draw another key, and a run that "
            "they share has one. For such a run draw it once: bits = jax.experimental."
            "multihost_utils.broadcast_one_to_all(np.frombuffer(os.urandom(8), np.uint32)), "
            "key = jax.random.wrap_key_data(bits); for runs apart leave out the broadcast"
        )
    bits = np.frombuffer(os.urandom(8), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(bits), impl=_IMPL)


def check_noise_key(key: object) -> jax.Array:
    """Returns a typed key of threefry, by which all noise is hashed, or raises."""
    checked = check_key(key)
    if str(jax.random.key_impl(checked)) != _IMPL:
        raise TypeError(
            f"key is one of {jax.random.key_impl(checked)!r}, and noise is made by threefry: take "
            f"it from dpoptax.random_key_from_os(), or jax.random.key(seed, impl={_IMPL!r})"
        )
    return checked
