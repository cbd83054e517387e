"""The size of the largest Poisson draw, and draws with NumPy's generator."""

import bisect
import functools
import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from dpoptax._random.shake256 import Shake256

Draws: TypeAlias = "Pcg64 | Shake256"
"""Draws of a sampler's seed and a key."""

# By default one Poisson draw in 10^12 exceeds its padding. At a batch size of 64, this takes 15 %
# more padding than one in 10^9. Accountants price the cut at any probability.
OVERFLOW_PROBABILITY = 1e-12
# If only δ can cover an overflow, it must be rare even for very small δ and long runs.
RARE_OVERFLOW_PROBABILITY = 1e-18


@functools.lru_cache(maxsize=64)
def largest_draw(size: int, probability: float, chance: float = OVERFLOW_PROBABILITY) -> int:
    """Returns the least number that a binomial draw exceeds with at most `chance`."""
    from scipy import special  # takes long to import

    mean = math.floor(size * probability)
    above = range(mean, size)
    return mean + bisect.bisect_left(
        above, True, key=lambda count: special.bdtrc(count, size, probability) <= chance
    )


class Pcg64:
    """Draws with NumPy's PCG64, in memory and time proportional to the result."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def by_chance(self, size: int, probability: float, at_most: int) -> np.ndarray:
        """Returns a Poisson sample of range(size), cut at random to `at_most` entries.

        The count is binomial, and the subset of that size is uniform. A uniform subset of a uniform
        subset is uniform, so it suffices to cut the count.
        """
        return self.subset(size, min(int(self._rng.binomial(size, probability)), at_most))

    def subset(self, size: int, count: int) -> np.ndarray:
        """Returns a uniformly random subset of range(size) with `count` entries."""
        return self._rng.choice(size, size=count, replace=False, shuffle=False)

    def permutation(self, size: int) -> np.ndarray:
        """Returns a uniformly random permutation of range(size)."""
        return self._rng.permutation(size)

    def below(self, bounds: np.ndarray) -> np.ndarray:
        """Returns an independent uniform number in range(bound) for each bound."""
        return self._rng.integers(bounds)
