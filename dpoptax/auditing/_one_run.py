"""Bounds by one run with many canaries: limits on any attacker's correct guesses."""

import dataclasses
import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from dpoptax._pricing.checks import integer, number
from dpoptax._pricing.trade_off_functions import TradeOff
from dpoptax.auditing._families import largest_refuted

# The p-value is searched on a grid of its logarithm, refined `_ROUNDS` times, and rounded up.
_LEAST, _POINTS, _ROUNDS = 1e-30, 64, 4
_FEWEST = 16
# The part of the failure probability that covers ties; see `guesses_about`.
_TIES = 1e-3


def p_value_dp(
    correct: int, guesses: int, canaries: int, epsilon: float, delta: float = 0.0
) -> float:
    """Returns the p-value of so many correct guesses, for an (ε, δ)-private run.

        β + 2mδ max_i P[v > W ≥ v − i]/i,   β = P[W ≥ v],   W ~ Binomial(r, e^ε/(1 + e^ε))

    Each of m canaries is in the data or not by an independent fair coin. The attacker observes the
    run, makes r guesses, and v of them are correct. The result is the largest probability of v or
    more correct guesses.

    For δ > 0 and v at most the mean of W, the result is 1. In this case the formula is too small,
    as the linear program of all (ε, δ)-private runs shows (`tests/auditing/one_run_test.py`), and
    so few correct guesses refute nothing.

    Args:
      correct: v.
      guesses: r, fixed beforehand.
      canaries: m.
      epsilon: ε.
      delta: δ.

    Returns:
      An upper bound p on the probability. The claim is refuted with confidence 1 − p.

    Raises:
      ValueError: the counts do not satisfy 0 ≤ v ≤ r ≤ m and r ≥ 1, ε is negative, or δ is outside
        of [0, 1].

    Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", 2023,
    corollary 5.4 and appendix D, which prints this value.

    >>> round(p_value_dp(75, 100, 100, epsilon=np.log(3)), 3)
    0.553
    """
    _check_counts(correct, guesses, canaries)
    if not number("epsilon", epsilon) >= 0 or not 0 <= number("delta", delta) <= 1:
        raise ValueError(
            f"`epsilon` must be at least 0 and `delta` in [0, 1], got {epsilon} and {delta}."
        )
    right = special.expit(epsilon)
    beta = float(stats.binom.sf(correct - 1, guesses, right))
    if delta == 0:
        return beta
    if correct <= guesses * right:
        return 1.0
    shifts = np.arange(1, correct + 1)
    gained = stats.binom.sf(correct - shifts - 1, guesses, right) - beta
    return min(1.0, beta + 2 * canaries * delta * float(np.max(gained / shifts)))


def p_value_fdp(correct: int, guesses: int, canaries: int, trade_off: TradeOff) -> float:
    """Returns the p-value of so many correct guesses, under a trade-off function.

    Let p_i be the probability of i correct guesses among r. For every c

        h(c − 1) ≥ f(1 − r(c)),   r(c) = Σ_{i ≥ c} p_i i/m,   h(c) = Σ_{i ≥ c} p_i (r − i)/m,

    since flipping one canary's coin turns its correct guess into a wrong one. So P[v or more] = p
    determines, one after the other, the least h(v − 1), r(v − 1), h(v − 2), …, and the least Σ p_i.
    The p-value is the smallest p for which Σ p_i exceeds 1, rounded up by less than 10⁻⁵ of itself.
    With f of (ε, δ), it is smaller than `p_value_dp` if there is something to refute and δ matters.
    The f of a mechanism includes its errors at every δ.

    Args:
      correct: v.
      guesses: r, fixed beforehand.
      canaries: m, each in the data or not by an independent fair coin.
      trade_off: f, for adding and for removing a record.

    Raises:
      ValueError: the counts do not satisfy 0 ≤ v ≤ r ≤ m and r ≥ 1.

    Source: Mahloujifar, Melis, Chaudhuri, "Auditing f-differential privacy in one run", 2024, the
    algorithm with abstentions, with two values per guess.

    >>> from dpoptax.auditing import approximate_trade_off, gaussian_trade_off
    >>> round(p_value_fdp(98, 100, 100, gaussian_trade_off(1.5)), 4)
    0.0969
    >>> round(p_value_fdp(98, 100, 100, approximate_trade_off(3.0, 1e-5)), 4)
    0.1583
    """
    _check_counts(correct, guesses, canaries)
    low, high = _LEAST, 1.0
    if not _contradicted(correct, guesses, canaries, trade_off, 1.0):
        return 1.0
    for _ in range(_ROUNDS):
        tails = np.geomspace(low, high, _POINTS)
        first = int(np.argmax(_contradicted(correct, guesses, canaries, trade_off, tails)))
        low, high = tails[max(0, first - 1)], tails[first]
    return float(high)


def _contradicted(
    correct: int, guesses: int, canaries: int, trade_off: TradeOff, tail: ArrayLike
) -> NDArray[np.bool_]:
    """Returns whether P[`correct` or more right] = `tail` needs probabilities above 1.

    The least sum of probabilities has the whole tail on `correct`, and each h as small as possible.
    For any other solution, r' and h', it holds after every i, by induction, that

        h' ≥ h   and   r' − r ≥ i/(guesses − i) (h' − h),

    since probability at larger i gives more r for its h, and f(1 − r) increases with r; or nothing
    changes any more, and the sum is at most as large. The same holds for a larger tail.
    """
    right = np.asarray(tail, np.float64) * correct / canaries
    wrong = np.asarray(tail, np.float64) * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        raised = np.maximum(wrong, trade_off.least(right))
        if np.all(raised == wrong):
            break  # nothing changes from here on
        right = np.minimum(right + i / (guesses - i) * (raised - wrong), 1.0)
        wrong = raised
    return np.asarray(right + wrong > guesses / canaries)


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
        """Returns whether the claim is refuted with this confidence, by `p_value_fdp`."""
        return any(
            bool(_contradicted(correct, guesses, self.canaries, trade_off, self._significance))
            for guesses, correct in zip(self.guesses, self.correct, strict=True)
        )

    def epsilon(self, delta: float) -> float:
        """Returns the largest ε at δ that `p_value_dp` refutes with this confidence."""
        return max(
            _refuted_epsilon(correct, guesses, self.canaries, delta, self._significance)
            for guesses, correct in zip(self.guesses, self.correct, strict=True)
        )

    @property
    def _significance(self) -> float:
        return (1 - self.confidence) / len(self.guesses)


# Cached, since resamples of the same canaries have few different counts.
@functools.lru_cache(maxsize=65536)
def _refuted_epsilon(
    correct: int, guesses: int, canaries: int, delta: float, significance: float
) -> float:
    return largest_refuted(
        lambda epsilon: p_value_dp(correct, guesses, canaries, epsilon, delta) < significance
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


def _check_counts(correct: int, guesses: int, canaries: int) -> None:
    for name, value in (("correct", correct), ("guesses", guesses), ("canaries", canaries)):
        integer(name, value, 0, "count them")
    if not 0 <= correct <= guesses <= canaries or guesses < 1:
        raise ValueError(
            "The counts must satisfy 0 <= correct <= guesses <= canaries and guesses >= 1, got "
            f"correct={correct}, guesses={guesses}, canaries={canaries}."
        )
