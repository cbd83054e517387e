"""What is taken for a random key: the same everywhere."""

import numbers

import jax
import jax.numpy as jnp
import numpy as np


def check_key(key: object) -> jax.Array:
    """Returns `key` as a typed key, or raises with the line to write.

    A legacy key, uint32 data as from `jax.random.PRNGKey`, has all bits of a key and becomes a
    typed one. A whole number is refused: it is one of few that can all be tried, and who means that
    writes it down.
    """
    if isinstance(key, jax.Array | np.ndarray):
        return _check_array(key)
    if isinstance(key, numbers.Integral):
        raise TypeError(_number(f"key={key!r}", key))
    raise TypeError(
        f"key={key!r}: want one key, as from dpoptax.random_key_from_os() or jax.random.key(seed)"
    )


def _check_array(key: jax.Array | np.ndarray) -> jax.Array:
    what = f"key is an array of shape {key.shape} and {key.dtype}"
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return key
        raise TypeError(f"{what}, several keys: want one, such as key=keys[0]")
    if jnp.issubdtype(key.dtype, jnp.integer) and key.ndim == 0:
        raise TypeError(_number(what, "seed"))
    if key.dtype == np.uint32 and key.ndim == 1:
        try:
            return jax.random.wrap_key_data(jnp.asarray(key))
        except TypeError:  # of another length than the generator's keys
            pass
    raise TypeError(
        f"{what}: want one key, as from dpoptax.random_key_from_os() or jax.random.key(seed); "
        "from the data of another generator's, jax.random.wrap_key_data(data, impl=...); a key of "
        "ChaCha20 is for the noise stages that random_key_from_os names"
    )


def _number(what: str, seed: object) -> str:
    return (
        f"{what}: want a key, not the number that one is made from. Write "
        "key=dpoptax.random_key_from_os(), which nobody can guess; or, for a run that can be "
        f"repeated, by whoever guesses the number too, key=jax.random.key({seed})"
    )
