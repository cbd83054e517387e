"""Bounds by one run with many canaries: limits on any attacker's correct guesses."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from dpoptax._pricing.trade_off_functions import TradeOff

_FEWEST = 16
# The part of the failure probability that covers ties; see `guesses_about`.
_TIES = 1e-3


def _contradicted(
    correct: int, guesses: int, canaries: int, trade_off: TradeOff, tail: float
) -> bool:
    """Returns whether f excludes that `correct` or more guesses are right with probability `tail`.

    Each of m canaries is in the data or not by an independent fair coin. Let p_i be the probability
    of i correct guesses. For every c

        h(c − 1) ≥ f(1 − r(c)),   r(c) = Σ_{i ≥ c} p_i i/m,   h(c) = Σ_{i ≥ c} p_i (r − i)/m,

    since flipping one canary's coin turns its correct guess into a wrong one. So P[v or more]
    determines, one after the other, the least h(v − 1), r(v − 1), h(v − 2), …, and the least Σ p_i.
    A tail for which Σ p_i exceeds 1 is impossible.

    The least sum of probabilities has the whole tail on `correct`, and each h as small as possible.
    For any other solution, r' and h', it holds after every i, by induction, that

        h' ≥ h   and   r' − r ≥ i/(guesses − i) (h' − h),

    since probability at larger i gives more r for its h, and f(1 − r) increases with r; or nothing
    changes any more, and the sum is at most as large. The same holds for a larger tail, so all
    larger tails are impossible as well.

    Source: Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one run", 2024, the
    algorithm with abstentions, with two values per guess.
    """
    right, wrong = tail * correct / canaries, tail * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        raised = max(wrong, float(trade_off.least(right)))
        if raised == wrong:
            break  # nothing changes from here on
        right = min(right + i / (guesses - i) * (raised - wrong), 1.0)
        wrong = raised
    return right + wrong > guesses / canaries


@dataclasses.dataclass(frozen=True)
class OneRunGuesses:
    """Holds the numbers of correct guesses about the canaries of one run.

    Attributes:
      canaries: m, each in the data or not by an independent fair coin.
      guesses: several numbers of guesses, fixed beforehand.
      correct: the number of correct guesses for each.
      confidence: the confidence of all conclusions together, which share the failure probability.
    """

    canaries: int
    guesses: tuple[int, ...]
    correct: tuple[int, ...]
    confidence: float

    def refutes(self, trade_off: TradeOff) -> bool:
        """Returns whether so many correct guesses refute the claim with this confidence.

        Source: Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one run", 2024.

        >>> from dpoptax.auditing import gaussian_trade_off
        >>> seen = OneRunGuesses(canaries=100, guesses=(100,), correct=(98,), confidence=0.9)
        >>> seen.refutes(gaussian_trade_off(1.4)), seen.refutes(gaussian_trade_off(1.6))
        (True, False)
        """
        significance = (1 - self.confidence) / len(self.guesses)
        return any(
            _contradicted(correct, guesses, self.canaries, trade_off, significance)
            for guesses, correct in zip(self.guesses, self.correct, strict=True)
        )


def guesses_about(scores: ArrayLike, included: ArrayLike, confidence: float) -> OneRunGuesses:
    """Guesses "in" for the highest scores and "out" for as many of the lowest.

    Six numbers of guesses are evaluated, from half of the canaries down to a 64th of them, and at
    least 16. Canaries may be listed in any order, also by their coins. If equal scores do not all
    fit into the guesses, the attacker chooses among them at random, and the count is one that is
    reached with probability 0.999. So the result does not depend on the order or on a generator.

    Args:
      scores: (canaries,), high for canaries that the attacker guesses to be in.
      included: (canaries,), True for canaries that were in.
      confidence: the confidence of all conclusions together.

    Raises:
      ValueError: there are fewer than 16 canaries.

    Source: Steinke, Nasr, Jagielski, 2023, algorithm 1, with k₊ = k₋.
    """
    _, places, sizes = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    inside = np.asarray(included, bool).reshape(-1)
    canaries, members = len(inside), np.bincount(places.reshape(-1)[inside], minlength=len(sizes))
    if canaries < _FEWEST:
        raise ValueError(f"There must be at least {_FEWEST} canaries, got {canaries}.")
    numbers = sorted({max(_FEWEST, canaries // 2**i) for i in range(1, 7)})
    counts = [
        _certain(sizes[::-1], members[::-1], (k + 1) // 2)
        + _certain(sizes, sizes - members, k // 2)
        for k in numbers
    ]
    confidence = 1 - (1 - _TIES) * (1 - confidence)
    return OneRunGuesses(canaries, tuple(numbers), tuple(counts), confidence)


# Why the test is valid with ties. The theorems bound the number V of correct guesses of any
# attacker whose guesses depend only on the output of the run and on own randomness: P[V >= c] <= a.
# An order of equal scores by position is not of this kind, since positions may depend on the coins,
# and neither is a fixed shuffle of positions. A random order is. Let c be a count with
# P[V >= c | scores, coins] >= 1 - t over random orders. If c refutes at level a (1 - t), then by
# Markov's inequality this happens with probability at most a (1 - t)/(1 - t) = a. Both kinds of
# guesses have t/2, so their counts add up by a union bound, also if they share a group of ties.
def _certain(sizes: NDArray[np.intp], right: NDArray[np.intp], guesses: int) -> int:
    """Returns a number of correct guesses that random orders of ties reach.

    Args:
      sizes: (groups,), numbers of canaries with equal scores, in the order of guesses.
      right: (groups,), the number of canaries of each group about which the guess is right.
      guesses: number of guesses.
    """
    ends = np.cumsum(sizes)
    whole = int(np.searchsorted(ends, guesses, side="right"))
    found, rest = int(right[:whole].sum()), guesses - int(ends[whole - 1] if whole else 0)
    if rest:
        found += int(stats.hypergeom.ppf(_TIES / 2, sizes[whole], right[whole], rest))
    return found
