"""Findings of checks: normal scores of counts with a known law, and exact p-values of many.

A count X of law F becomes the score z = Φ⁻¹(U), where U is uniform on [F(X − 1), F(X)]. If the law
is right, z is exactly standard normal. If each law is known given the counts before it, the scores
are independent, so their sum and their squares have the laws of textbooks. The score of a count
that can have one value only is a normal draw.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

FALSE_ALARM = 1e-3
"""The probability that a correct run raises an alarm is at most this, for each check."""


class Finding(NamedTuple):
    """One test of a check.

    Attributes:
      name: the tested property.
      p_value: an upper bound on the probability that a correct run is at least this far off.
      seen: the numbers, as a sentence.
    """

    name: str
    p_value: float
    seen: str

    def __str__(self) -> str:
        p_value = f"p = {self.p_value:.1g}" if self.p_value else "p < 1e-300"
        return f"{self.name}: {self.seen} ({p_value})"


class Checked:
    """Base of reports: the tests that Holm's method rejects, and the alarm that they raise."""

    tests: tuple[Finding, ...]

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The tests that refute the claim, by Holm's method."""
        return rejected(self.tests)

    @property
    def alarm(self) -> bool:
        """True if the claim is refuted.

        If it is right, this has a probability of at most 1 in 1,000.
        """
        return bool(self.findings)


# Scores of tails below the least double.
_LARGEST = 37.0


def binomial_scores(
    found: Integers, trials: Integers, probability: Array, most: Integers, rng: np.random.Generator
) -> Array:
    """Returns the scores of min(Bin(trials, probability), most)."""
    above = np.where(found < most, special.bdtrc(found, trials, probability), 0.0)
    below = special.bdtr(np.maximum(found - 1, 0), trials, probability)
    below = np.where(found > 0, below, 0.0)
    equal_or_more = special.bdtrc(found - 1, trials, probability)
    equal_or_more = np.where(found > most, 0.0, equal_or_more)
    equal_or_less = np.where(found < most, special.bdtr(found, trials, probability), 1.0)
    return _scores(above, equal_or_more, below, equal_or_less, rng)


def hypergeometric_scores(
    found: Integers, pool: Integers, marked: Integers, drawn: Integers, rng: np.random.Generator
) -> Array:
    """Returns the scores of the numbers of marked records among `drawn` ones of a pool."""
    law = stats.hypergeom(np.maximum(pool, 1), marked, drawn)
    tails = law.sf(found), law.sf(found - 1), law.cdf(found - 1), law.cdf(found)
    return _scores(*tails, rng)


def _scores(
    above: Array, equal_or_more: Array, below: Array, equal_or_less: Array, rng: np.random.Generator
) -> Array:
    """Returns scores from both tails, so that neither end loses precision."""
    share = rng.random(np.shape(above))
    upper = (1 - share) * above + share * equal_or_more
    lower = share * below + (1 - share) * equal_or_less
    z = np.where(upper < lower, -special.ndtri(upper), special.ndtri(lower))
    return np.clip(z, -_LARGEST, _LARGEST)


def mean_p_value(scores: Array) -> float:
    """Returns the p-value of the mean of independent scores, over all and over the last half."""
    parts = [part for part in (scores, scores[len(scores) // 2 :]) if len(part)]
    found = [2 * special.ndtr(-abs(part.sum()) / np.sqrt(len(part))) for part in parts]
    return any_of(found)


def spread_p_value(scores: Array) -> float:
    """Returns the two-sided p-value of the sum of squares of independent scores."""
    if not len(scores):
        return 1.0
    total = float(np.sum(scores**2))
    sides = stats.chi2.cdf(total, len(scores)), stats.chi2.sf(total, len(scores))
    return min(1.0, 2 * float(min(sides)))


def extremes_p_value(scores: Array) -> float:
    """Returns the p-value of the largest and the smallest of independent scores.

    Each may be too far from the mean, or too near to it if large counts are cut.
    """
    if not len(scores):
        return 1.0
    found = []
    for end in (scores.max(), -scores.min()):
        log_all_below = len(scores) * special.log_ndtr(end)
        found += [float(np.exp(log_all_below)), float(-np.expm1(log_all_below))]
    return any_of(found)


def any_of(p_values: list[float]) -> float:
    """Returns a p-value of the union of hypotheses, by Bonferroni."""
    return min(1.0, max(1, len(p_values)) * min(map(float, p_values), default=1.0))


def rejected(tests: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns the tests that Holm's method rejects, the smallest p-value first."""
    kept: list[Finding] = []
    for i, each in enumerate(sorted(tests, key=lambda test: test.p_value)):
        if each.p_value * (len(tests) - i) > FALSE_ALARM:
            break
        kept.append(each)
    return tuple(kept)
