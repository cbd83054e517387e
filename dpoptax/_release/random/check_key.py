"""Checks random keys for all functions that take one."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np


def check_key(key: object) -> jax.Array:
    """Returns `key` as a typed key, or raises an error with the line to write.

    A legacy key, such as the uint32 data of `jax.random.PRNGKey`, is converted. An integer raises
    an error: an adversary can try all small seeds, so a seed must be an explicit choice.
    """
    if isinstance(key, jax.Array | np.ndarray):
        return _check_array(key)
    if isinstance(key, numbers.Integral):
        raise TypeError(_number("an integer"))
    raise TypeError(
        f"`key` must be a single key, got {key!r}. Write `dpoptax.random_key_from_os()` or "
        "`jax.random.key(seed)`."
    )


def _check_array(key: jax.Array | np.ndarray) -> jax.Array:
    what = f"an array of shape {key.shape} and dtype {key.dtype}"
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return key
        raise TypeError(f"`key` must be a single key, got {what}. Write `keys[0]`.")
    if jnp.issubdtype(key.dtype, jnp.integer) and key.ndim == 0:
        raise TypeError(_number(what))
    if key.dtype == np.uint32 and key.ndim == 1:
        try:
            return jax.random.wrap_key_data(jnp.asarray(key))
        except TypeError:  # the length does not match the generator's keys
            pass
    raise TypeError(
        f"`key` must be a single key, got {what}. Write `dpoptax.random_key_from_os()` or "
        "`jax.random.key(seed)`. For key data of another generator, write "
        "`jax.random.wrap_key_data(data, impl=...)`. Only the noise stages listed in "
        "`random_key_from_os` accept ChaCha20 keys."
    )


def _number(what: str) -> str:
    return (
        f"`key` must be a random key, not a seed, got {what}. Write "
        "`dpoptax.random_key_from_os()`, which cannot be guessed. For a reproducible run, write "
        "`jax.random.key(seed)`; an adversary who guesses the seed can then repeat it as well."
    )
