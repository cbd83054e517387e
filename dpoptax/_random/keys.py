"""Draws, checks and derives noise keys."""

import functools
import numbers
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpoptax._random import threefry

Generator = Literal["threefry", "chacha20"]

_IMPL = "threefry2x32"
_CHACHA20_WORDS = 8  # JAX has no key type of this length


def random_key_from_os(generator: Generator = "threefry") -> jax.Array:
    """Returns a key of random bits from the operating system.

    `jax.random.key(seed)` gives one of 2³² keys unless 64-bit types are enabled. An adversary can
    try all of them, or find the seed in a config, and subtract the noise. A key from this function
    cannot be guessed, and a run with it cannot be repeated. The optimizer's state contains the key,
    so keep checkpoints as secret as the data.

    The key determines the generator of the noise:

    - "threefry": a typed JAX key of 64 bits. It does not resist a search of 2⁶⁴ keys. Threefry-2x32
      is not a cryptographic generator: no break of its 20 rounds is known, but it was designed for
      simulation and has had little cryptanalysis.
    - "chacha20": 256 bits, uint32 of shape (8,), for ChaCha20, the cipher of TLS. Unless it is
      broken, the noise is indistinguishable from independent noise, even with all data and all
      releases. `gaussian_noise`, `adaptive_gaussian_noise`, `correlated_noise` and `clip_and_noise`
      support it, in float32 or fixed point. Drawing takes about four times as long. Compilation
      takes a second, once for all small parameters and once per shape of large ones.

    Args:
      generator: "threefry" or "chacha20".

    Raises:
      ValueError: the generator is unknown.
      RuntimeError: there are several processes, and each would draw another key.

    Source: for ChaCha20, RFC 8439, 2018.

    >>> key = random_key_from_os()
    >>> key.shape, str(jax.random.key_impl(key))
    ((), 'threefry2x32')
    >>> random_key_from_os("chacha20").shape
    (8,)
    """
    words = number_of_words(generator)
    if jax.process_count() > 1:
        raise RuntimeError(
            f"`random_key_from_os` must be called in a single process, got {jax.process_count()} "
            "processes, and each would draw another key. Use `plan.new_run()`, which shares the "
            "key of one process."
        )
    return key_of_words(np.frombuffer(os.urandom(4 * words), np.uint32))


def number_of_words(generator: Generator) -> int:
    """Returns the number of 32-bit words of a generator's key."""
    if generator not in get_args(Generator):
        raise ValueError(f"`generator` must be one of {get_args(Generator)}, got {generator!r}.")
    return 2 if generator == "threefry" else _CHACHA20_WORDS


def key_of_words(words: np.ndarray) -> jax.Array:
    """Returns the noise key with these 32-bit words, of the generator with keys of this length."""
    bits = jnp.asarray(words, jnp.uint32)
    return bits if len(words) == _CHACHA20_WORDS else jax.random.wrap_key_data(bits, impl=_IMPL)


def check_key(key: object) -> jax.Array:
    """Returns `key` as a typed key, or raises an error with the line to write.

    A legacy key, such as the uint32 data of `jax.random.PRNGKey`, is converted. An integer raises
    an error: an adversary can try all small seeds, so a seed must be an explicit choice.
    """
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        if key.shape == ():
            return key
        raise TypeError(f"`key` must be a single key, got {_array(key)}. Write `keys[0]`.")
    if isinstance(key, jax.Array | np.ndarray):
        return _wrap_data(key)
    if isinstance(key, numbers.Integral):
        raise TypeError(_number("an integer"))
    raise TypeError(
        f"`key` must be a single key, got {key!r}. Write `dpoptax.random_key_from_os()` or "
        "`jax.random.key(seed)`."
    )


def _wrap_data(key: jax.Array | np.ndarray) -> jax.Array:
    """Returns the typed key with the data of a legacy key."""
    if jnp.issubdtype(key.dtype, jnp.integer) and key.ndim == 0:
        raise TypeError(_number(_array(key)))
    if key.dtype == np.uint32 and key.ndim == 1:
        try:
            return jax.random.wrap_key_data(jnp.asarray(key))
        except TypeError:  # the length does not match the generator's keys
            pass
    raise TypeError(
        f"`key` must be a single key, got {_array(key)}. Write `dpoptax.random_key_from_os()` or "
        "`jax.random.key(seed)`. For key data of another generator, write "
        "`jax.random.wrap_key_data(data, impl=...)`. Only the noise stages listed in "
        "`random_key_from_os` accept ChaCha20 keys."
    )


def _array(key: jax.Array | np.ndarray) -> str:
    return f"an array of shape {key.shape} and dtype {key.dtype}"


def _number(what: str) -> str:
    return (
        f"`key` must be a random key, not a seed, got {what}. Write "
        "`dpoptax.random_key_from_os()`, which cannot be guessed. For a reproducible run, write "
        "`jax.random.key(seed)`; an adversary who guesses the seed can then repeat it as well."
    )


def check_noise_key(key: object) -> jax.Array:
    """Returns a key for noise: a typed threefry key, or the words of a ChaCha20 key."""
    if isinstance(key, jax.Array | np.ndarray) and key.ndim == 1 and _is_chacha20(key):
        return jnp.asarray(key)
    return check_threefry_key(key)


def check_threefry_key(key: object) -> jax.Array:
    """Returns a typed threefry key, or raises an error."""
    checked = check_key(key)
    if str(jax.random.key_impl(checked)) != _IMPL:
        raise TypeError(
            f"`key` must be a threefry key, got one of {jax.random.key_impl(checked)!r}. Use "
            f"`dpoptax.random_key_from_os()` or `jax.random.key(seed, impl={_IMPL!r})`."
        )
    return checked


def generator_of(key: jax.Array) -> Generator:
    """Returns the generator that a noise key belongs to."""
    return "chacha20" if _is_chacha20(key) else "threefry"


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """Derives a key for a uint32 number, using the key's generator."""
    return dpoptax_folded_key(key, lax.convert_element_type(number, jnp.uint32))


@jax.jit
def dpoptax_folded_key(key: jax.Array, number: jax.Array) -> jax.Array:
    """Computes `fold_in`. `dpoptax.information_flow` recognizes it by name (`marks`)."""
    return _generator(key).fold_in(key, number)


@functools.partial(jax.jit, static_argnums=1)  # outside of `jit`, each operation would compile
def two_words(key: jax.Array, number: int) -> jax.Array:
    """Returns two words of the key for a number. They do not reveal the key itself."""
    derived: jax.Array = _generator(key).fold_in(key, jnp.uint32(number))
    return derived[:2] if _is_chacha20(key) else jax.random.key_data(derived)


def words_of(key: jax.Array) -> bytes:
    """Returns the bits of a key of either generator, which are secret."""
    return np.asarray(key if _is_chacha20(key) else jax.random.key_data(key)).tobytes()


def words_at(
    key: jax.Array, leaf: ArrayLike, places: jax.Array, streams: Sequence[int]
) -> list[jax.Array]:
    """Returns two 32-bit words for each stream at every place of a leaf.

    Different leaves, given by their numbers, and different streams have different words. There are
    at most eight streams.
    """
    words: list[jax.Array] = _generator(key).noise_words(key, leaf, places, streams)
    return words


def _generator(key: jax.Array) -> ModuleType:
    if not _is_chacha20(key):
        return threefry
    from dpoptax._random import chacha20  # few runs need it

    return chacha20


def _is_chacha20(key: jax.Array | np.ndarray) -> bool:
    return key.dtype == np.uint32 and key.shape[-1:] == (_CHACHA20_WORDS,)
