"""Computes ChaCha20, a cryptographic generator for noise with 256-bit keys."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from dpoptax._random.threefry import rotated

_CONSTANTS = tuple(np.frombuffer(b"expand 32-byte k", "<u4").tolist())
_COLUMNS = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15))
_DIAGONALS = ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
# The first word of a nonce is the purpose of a block. For noise, the second is the stream, 1, 2, …,
# and the third the number of the leaf.
_FOLDED, _NOISE = 0, 2


def chacha20(
    key: jax.Array, counters: jax.Array, nonce: Sequence[ArrayLike], *, looped: bool = False
) -> list[jax.Array]:
    """Returns the 16 words of the blocks at `counters` (RFC 8439, section 2.3).

    Args:
      key: uint32, shape (8,).
      counters: uint32 of any shape; each word has this shape.
      nonce: three words.
      looped: whether to run the rounds in a loop. A loop compiles fast, but is slow for many
        counters, because every round stores the words in memory. In unrolled rounds they stay in
        registers.
    """
    start = [jnp.uint32(word) for word in _CONSTANTS]
    start += [key[i] for i in range(len(key))]
    start += [counters, *map(jnp.uint32, nonce)]
    words = list(start)
    if looped:
        words = [jnp.broadcast_to(word, counters.shape) for word in words]
        words = lax.fori_loop(0, 10, lambda _, words: _two_rounds(words), words)
    else:
        for _ in range(10):
            words = _two_rounds(words)
    return [word + first for word, first in zip(words, start, strict=True)]


def noise_words(
    key: jax.Array, leaf: ArrayLike, counters: jax.Array, streams: Sequence[int]
) -> list[jax.Array]:
    """Returns two words for each stream of each counter's block, of at most eight streams."""
    return chacha20(key, counters, (_NOISE, streams[0], leaf))[: 2 * len(streams)]


def fold_in(key: jax.Array, number: jax.Array) -> jax.Array:
    """Returns a distinct key for each uint32 number, (8,)."""
    return jnp.stack(chacha20(key, number, (_FOLDED, 0, 0), looped=True)[: len(key)])


def _two_rounds(words: Sequence[jax.Array]) -> list[jax.Array]:
    words = list(words)
    for a, b, c, d in (*_COLUMNS, *_DIAGONALS):
        # The quarter round of RFC 8439, section 2.1.
        for i, j, k, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            words[i] += words[j]
            words[k] = rotated(words[k] ^ words[i], bits)
    return words
