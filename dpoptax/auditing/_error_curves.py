"""Error rates of an attack at many thresholds, and the variation among canaries."""

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from dpoptax._pricing.trade_off_functions import TradeOff

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class TradeOffCurve:
    """Holds an attack's error rates at several thresholds of its score.

    Attributes:
      false_positive_rates: (thresholds,), over the runs without the canary.
      false_negative_rates: (thresholds,), over the runs with the canary.
      false_positive_bounds: (2, thresholds), lower and upper, by Clopper and Pearson.
      false_negative_bounds: (2, thresholds), in the same way.
      confidence: probability that all true rates are within all of these bounds.
    """

    false_positive_rates: Array
    false_negative_rates: Array
    false_positive_bounds: Array
    false_negative_bounds: Array
    confidence: float

    def refutes(self, trade_off: TradeOff) -> bool:
        """Returns whether a test has smaller errors than the claim, with this confidence.

        f(upper bound of the false-positive rate) > upper bound of the false-negative rate
        """
        least = trade_off(self.false_positive_bounds[1])
        return bool(np.any(least > self.false_negative_bounds[1]))


def trade_off_curve(
    inside: ArrayLike, outside: ArrayLike, thresholds: ArrayLike, *, confidence: float = 0.999
) -> TradeOffCurve:
    """Returns the error rates of guessing "in" if the score is at least a threshold.

        [B(a/2; k, n − k + 1), B(1 − a/2; k + 1, n − k)],   a = (1 − confidence)/(2 thresholds)

    This interval bounds each rate of k in n independent runs, with B the quantiles of beta
    distributions. All bounds hold together with this confidence.

    Args:
      inside: scores of independent runs with the canary, (runs,).
      outside: scores of independent runs without it.
      thresholds: (thresholds,), chosen without looking at these scores.
      confidence: in (0, 1).

    Raises:
      ValueError: scores or thresholds are empty, or `confidence` is not in (0, 1).

    Source: Clopper, Pearson, "The use of confidence or fiducial limits", 1934; Nasr et al., "Tight
    auditing of differentially private machine learning", 2023, for such a bound of the trade-off.

    >>> curve = trade_off_curve([1.0] * 500, [0.0] * 500, [0.5], confidence=0.98)
    >>> curve.false_positive_bounds.round(4)
    array([[0.    ],
           [0.0105]])
    """
    values = [np.asarray(a, np.float64).reshape(-1) for a in (inside, outside, thresholds)]
    if not all(a.size for a in values):
        sizes = [a.size for a in values]
        raise ValueError(
            "`inside`, `outside` and `thresholds` must each have at least one entry, got "
            f"{sizes[0]}, {sizes[1]} and {sizes[2]}."
        )
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be in (0, 1), got {confidence}.")
    within, without, at = values
    missed = np.searchsorted(np.sort(within), at, side="left")
    taken = len(without) - np.searchsorted(np.sort(without), at, side="left")
    tail = (1 - confidence) / (4 * len(at))
    return TradeOffCurve(
        taken / len(without),
        missed / len(within),
        clopper_pearson(taken, len(without), tail),
        clopper_pearson(missed, len(within), tail),
        confidence,
    )


def clopper_pearson(counts: NDArray[np.intp], trials: int, tail: float) -> Array:
    """Returns limits (2, counts), each wrong with probability at most `tail`."""
    low = np.where(counts > 0, stats.beta.ppf(tail, counts, trials - counts + 1), 0.0)
    high = np.where(counts < trials, stats.beta.isf(tail, counts + 1, trials - counts), 1.0)
    return np.stack([low, high])


@dataclasses.dataclass(frozen=True)
class CanaryScores:
    """Holds the scores of one run's canaries.

    Attributes:
      scores: (canaries,), high for canaries that the attacker guesses to be in.
      included: (canaries,), True for canaries that were in.
    """

    scores: Array
    included: NDArray[np.bool_]

    @property
    def auc(self) -> float:
        """The probability that an included canary scores higher; ties count half."""
        ranks = stats.rankdata(self.scores)[self.included]
        within, without = len(ranks), len(self.scores) - len(ranks)
        if not within * without:
            raise ValueError(
                "At least one canary must be in and one out, got "
                f"{within} canaries in and {without} out."
            )
        return float((ranks.sum() - within * (within + 1) / 2) / (within * without))


def bootstrap_interval(
    canaries: CanaryScores,
    statistic: Callable[[CanaryScores], float] = lambda canaries: canaries.auc,
    *,
    confidence: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Returns the variation of a result over canaries, by bootstrap percentiles.

    Included and excluded canaries are each resampled with replacement. The result is the interval
    between the quantiles (1 ∓ confidence)/2 of the statistic. This is not a proof: canaries of one
    run share its noise, so another run may have another interval. Only the lower bounds on ε are
    proved.

    Args:
      canaries: the canaries of one run.
      statistic: a function of canaries; by default the area under the attack's curve.
      confidence: fraction of the resamples in the interval, in (0, 1).
      resamples: number of resamples.
      seed: the seed of the resampling.

    Raises:
      ValueError: `confidence` is not in (0, 1).

    Source: Efron, "Bootstrap methods: another look at the jackknife", 1979.

    >>> scores = CanaryScores(np.arange(100.0), np.arange(100) % 5 > 1)
    >>> low, high = bootstrap_interval(scores)
    >>> low < scores.auc < high
    True
    """
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be in (0, 1), got {confidence}.")
    rng = np.random.default_rng(seed)
    groups = [np.flatnonzero(canaries.included), np.flatnonzero(~canaries.included)]
    found = []
    for _ in range(resamples):
        drawn = np.concatenate([rng.choice(group, group.size) for group in groups])
        drawn = rng.permutation(drawn)
        found.append(statistic(CanaryScores(canaries.scores[drawn], canaries.included[drawn])))
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    return float(low), float(high)
