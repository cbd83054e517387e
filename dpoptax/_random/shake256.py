"""Draws from exact distributions, using bits of SHAKE-256."""

import hashlib
from collections.abc import Iterator

import numpy as np

# Records per chunk, which needs 8 MB of bits.
_CHUNK = 2**22


def shake256(seed: bytes, label: str, key: tuple[int, ...]) -> "Shake256":
    """Returns a generator for a seed, a label and a key.

    The draws of different triples are independent.
    """
    # Prefixes are unique: the seed has a fixed length, and the lengths of the rest are encoded.
    numbers = (len(label), len(key), *key)
    return Shake256(b"".join((seed, *(n.to_bytes(16, "big") for n in numbers), label.encode())))


class Shake256:
    """Draws random numbers determined by a secret prefix, one request after another.

    The bits are indistinguishable from independent uniform ones, assuming that SHAKE-256 (FIPS 202)
    keyed with a 256-bit secret is indistinguishable from a random function. From such bits, the
    distributions are exact.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._requests = 0

    def by_chance(self, size: int, probability: float, at_most: int) -> np.ndarray:
        """Selects each of range(size) independently with probability ⌊2⁶⁴ p⌋/2⁶⁴.

        If more than `at_most` are selected, the result is a uniformly random subset of `at_most` of
        them.
        """
        drawn = np.concatenate([*self._coins(size, probability)])
        return drawn if len(drawn) <= at_most else drawn[self.subset(len(drawn), at_most)]

    def subset(self, size: int, count: int) -> np.ndarray:
        """Returns a uniformly random subset of range(size) of `count` elements.

        The method is the start of a Fisher–Yates shuffle.
        """
        # `moved` holds the displaced elements, so that range(size) is never stored.
        found, moved = np.zeros(count, np.int64), dict[int, int]()
        picks = np.arange(count) + self.below(size - np.arange(count))
        for place, pick in enumerate(picks.tolist()):
            found[place] = moved.get(pick, pick)
            moved[pick] = moved.get(place, place)
        return found

    def permutation(self, size: int) -> np.ndarray:
        """Returns a uniformly random permutation of range(size).

        The method sorts 64-bit words, and draws all of them again if two are equal.
        """
        while True:
            words = self.words(size)
            order = np.argsort(words, kind="stable")
            if not np.any(np.diff(words[order]) == 0):
                return order

    def below(self, bounds: np.ndarray) -> np.ndarray:
        """Returns an independent uniform number in range(bound) for each bound."""
        each = bounds.astype(np.uint64)
        # Words at or above the last multiple of the bound would make small numbers more likely.
        # In unsigned arithmetic, -n % n is 2⁶⁴ mod n.
        most = ~(-each % each)
        while True:
            words = self.words(len(each))
            if np.all(words <= most):
                return (words % each).astype(np.int64)

    def words(self, count: int) -> np.ndarray:
        """Returns `count` new 64-bit words."""
        return np.frombuffer(self._bits(8 * count), "<u8")

    def _coins(self, size: int, probability: float) -> Iterator[np.ndarray]:
        """Yields, in chunks, the indices whose 64-bit word is below ⌊2⁶⁴ p⌋.

        The first 16 bits nearly always decide. If they do not, the other 48 bits are drawn.
        """
        numerator, denominator = float(probability).as_integer_ratio()
        high, low = divmod(2**64 * numerator // denominator, 2**48)
        for start in range(0, size, _CHUNK):
            first = np.frombuffer(self._bits(2 * min(_CHUNK, size - start)), "<u2")
            heads, ties = first < high, np.flatnonzero(first == high)
            heads[ties] = self.words(len(ties)) >> np.uint64(16) < np.uint64(low)
            yield start + np.flatnonzero(heads)

    def _bits(self, count: int) -> bytes:
        self._requests += 1
        request = self._requests.to_bytes(16, "big")
        return hashlib.shake_256(self._prefix + request).digest(count)
