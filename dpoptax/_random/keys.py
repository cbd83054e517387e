"""Keys of noise, those that no one can guess, and what is derived from one."""

import os
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dpoptax._marks import NOISE, mark
from dpoptax._random import chacha20
from dpoptax._random.check_key import check_key
from dpoptax._random.threefry import split as _split
from dpoptax._random.threefry import threefry

Generator = Literal["threefry", "chacha20"]

_IMPL = "threefry2x32"


def random_key_from_os(generator: Generator = "threefry") -> jax.Array:
    """Returns a key of random bits from the operating system's generator.

    `jax.random.key(seed)` makes one of 2³² keys unless 64-bit types are enabled, and people choose
    few of those: an attacker who tries them all, or finds the seed in a config, subtracts the
    noise. This answers that threat: the key is as unpredictable as its bits can be. A run with it
    cannot be repeated; the key is in the optimizer's state, so keep checkpoints as secret as the
    data.

    Which generator makes the noise of a run, the key decides:

    - "threefry": a typed key of JAX, of 64 bits. It does not answer an attacker who can try 2⁶⁴
      keys. And threefry-2x32 is no cryptographic generator: no break of its 20 rounds is known,
      but it was made for simulation, and has had little cryptanalysis.
    - "chacha20": 256 bits, uint32 of shape (8,), for ChaCha20, the cipher of TLS. Noise is then as
      good as independent to whoever cannot break it, also to who knows all data and sees all
      releases, and so all noise so far. For `gaussian_noise`, `adaptive_gaussian_noise`,
      `correlated_noise` and `clip_and_noise`, in float32 or fixed point; a number takes
      some four times as long, a little more than one of `jax.random.normal` in floating point, and
      a second to compile, once for all small parameters and for each shape of large ones.

    Args:
      generator: "threefry" or "chacha20".

    Raises:
      ValueError: another generator.
      RuntimeError: in a process of several, each of which would draw another key.

    Source: for ChaCha20, RFC 8439, 2018.

    >>> key = random_key_from_os()
    >>> key.shape, str(jax.random.key_impl(key))
    ((), 'threefry2x32')
    >>> random_key_from_os("chacha20").shape
    (8,)
    """
    if generator not in get_args(Generator):
        raise ValueError(f"generator={generator!r}: want one of {get_args(Generator)}")
    words = 2 if generator == "threefry" else chacha20.KEY_WORDS
    if jax.process_count() > 1:
        key = "bits" if generator == "chacha20" else "jax.random.wrap_key_data(bits)"
        raise RuntimeError(
            f"each of these {jax.process_count()} processes would draw another key, and a run that "
            "they share has one. For such a run draw it once: bits = jax.experimental."
            f"multihost_utils.broadcast_one_to_all(np.frombuffer(os.urandom({4 * words}), "
            f"np.uint32)), key = {key}; for runs apart leave out the broadcast"
        )
    bits = jnp.asarray(np.frombuffer(os.urandom(4 * words), np.uint32))
    return jax.random.wrap_key_data(bits, impl=_IMPL) if generator == "threefry" else bits


def check_noise_key(key: object) -> jax.Array:
    """Returns a key by which noise is hashed: a typed one of threefry, or words of ChaCha20's."""
    if isinstance(key, jax.Array | np.ndarray) and key.ndim == 1 and _is_chacha20(key):
        return jnp.asarray(key)
    return check_threefry_key(key)


def check_threefry_key(key: object) -> jax.Array:
    """Returns a typed key of threefry, or raises."""
    checked = check_key(key)
    if str(jax.random.key_impl(checked)) != _IMPL:
        raise TypeError(
            f"key is one of {jax.random.key_impl(checked)!r}, and noise is made by threefry: take "
            f"it from dpoptax.random_key_from_os(), or jax.random.key(seed, impl={_IMPL!r})"
        )
    return checked


def generator_of(key: jax.Array) -> Generator:
    """Which generator a key of noise is of."""
    return "chacha20" if _is_chacha20(key) else "threefry"


def fold_in(key: jax.Array, number: jax.Array | int) -> jax.Array:
    """A key for a number, by the key's own generator."""
    if _is_chacha20(key):
        return chacha20.fold_in(key, number)
    return jax.random.fold_in(key, number)


def marked_as_noise(key: jax.Array) -> jax.Array:
    """The same key, marked as that of a release."""
    if _is_chacha20(key):
        return mark(key, NOISE)
    words = mark(jax.random.key_data(key), NOISE)
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))


def split(key: jax.Array, count: int) -> jax.Array:
    """So many keys of a key, along a leading axis."""
    return chacha20.split(key, count) if _is_chacha20(key) else _split(key, count)


def two_words(key: jax.Array) -> jax.Array:
    """Two words of 32 bits that tell nothing of the key that they are of."""
    if _is_chacha20(key):
        return chacha20.fold_in(key, 0)[:2]
    return jax.random.bits(key, (2,), jnp.uint32)


def words_at(key: jax.Array, places: jax.Array, streams: Sequence[int]) -> list[jax.Array]:
    """Two words of 32 bits for each stream, at every place: of other streams, others.

    At most eight streams. Of one key, or of keys that broadcast against the places.
    """
    if _is_chacha20(key):
        return chacha20.noise_words(key, places, streams[0], 2 * len(streams))
    words = jax.random.key_data(key)
    high, low = words[..., 0], words[..., 1]
    return [word for s in streams for word in threefry(high, low, places, stream=s)]


def _is_chacha20(key: jax.Array | np.ndarray) -> bool:
    return key.dtype == np.uint32 and key.shape[-1:] == (chacha20.KEY_WORDS,)
