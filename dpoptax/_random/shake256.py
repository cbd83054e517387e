"""Draws by SHAKE-256, of exact laws: each compares or orders whole numbers of 64 random bits."""

import functools
import hashlib
from collections.abc import Iterator

import numpy as np

SEED_BYTES = 32
"""Length of a seed of 256 bits."""

# Records that are drawn at once: 8 MB of bits.
_CHUNK = 2**22


def shake256(seed: bytes, label: str, key: tuple[int, ...]) -> "Shake256":
    """The draws of a seed, a label and a key: of each three, others."""
    # Two of them are never of one prefix: the seed has its length, and all that follows says its.
    numbers = (len(label), len(key), *key)
    return Shake256(b"".join((seed, *(n.to_bytes(16, "big") for n in numbers), label.encode())))


class Shake256:
    """What is drawn by a secret prefix, one request after another.

    The bits are as good as independent and uniform to whoever cannot tell SHAKE-256 (FIPS 202),
    with a secret of 256 bits in front, from a random function. Of such bits the laws are exact.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._requests = 0

    def by_chance(self, size: int, probability: float, at_most: int) -> np.ndarray:
        """Of range(size) each with chance ⌊2⁶⁴ p⌋/2⁶⁴, apart from all others; or of these a subset.

        So many and no more than `at_most`, and all such subsets alike.
        """
        drawn = np.concatenate([*self._coins(size, probability)])
        return drawn if len(drawn) <= at_most else drawn[self.subset(len(drawn), at_most)]

    def subset(self, size: int, count: int) -> np.ndarray:
        """So many of range(size), all subsets alike: the first of a shuffle by Fisher and Yates."""
        found, moved = np.zeros(count, np.int64), dict[int, int]()
        picks = np.arange(count) + self.below(size - np.arange(count))
        for place, pick in enumerate(picks.tolist()):
            found[place] = moved.get(pick, pick)
            moved[pick] = moved.get(place, place)
        return found

    def permutation(self, size: int) -> np.ndarray:
        """Of range(size), all alike: by words of 64 bits, drawn anew where two are equal."""
        while True:
            words = self.words(size)
            order = np.argsort(words, kind="stable")
            if not np.any(np.diff(words[order]) == 0):
                return order

    def permuted(self, places: np.ndarray, size: int) -> np.ndarray:
        """What stands at the places of a permutation of range(size), which is kept.

        It has a prefix of its own, so that no request here gets its words, however often it is
        asked for. Nor has another label that prefix, as a longer one says so in front.
        """
        return _kept_permutation(self._prefix + b"kept", size)[places]

    def below(self, bounds: np.ndarray) -> np.ndarray:
        """A number of range(bound) for each bound, all alike and apart from each other."""
        each = bounds.astype(np.uint64)
        # The words from the last multiple of the bound on would make small numbers more likely.
        most = ~(-each % each)
        while True:
            words = self.words(len(each))
            if np.all(words <= most):
                return (words % each).astype(np.int64)

    def words(self, count: int) -> np.ndarray:
        """So many words of 64 bits that no other request gets."""
        return np.frombuffer(self._bits(8 * count), "<u8")

    def _coins(self, size: int, probability: float) -> Iterator[np.ndarray]:
        """The heads, by chunks: where a word of 64 bits is below ⌊2⁶⁴ p⌋.

        Its first 16 bits nearly always tell; where they do not, the other 48 are drawn.
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


@functools.lru_cache(maxsize=2)
def _kept_permutation(prefix: bytes, size: int) -> np.ndarray:
    return Shake256(prefix).permutation(size)
