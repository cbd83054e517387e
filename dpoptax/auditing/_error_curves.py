"""Error rates of an attack at many thresholds."""

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from dpoptax._pricing.trade_off_functions import TradeOff

Array = NDArray[np.float64]
Counts = NDArray[np.intp]


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
    return curve_of_counts(taken, taken, len(without), missed, len(within), confidence)


def curve_of_counts(
    taken: Counts, most_taken: Counts, outside: int, missed: Counts, inside: int, confidence: float
) -> TradeOffCurve:
    """Returns the error rates of `taken` and `missed` runs, and their limits.

    The upper limits of false-positive rates are those of `most_taken`.
    """
    tail = (1 - confidence) / (4 * len(taken))
    low, _ = _clopper_pearson(taken, outside, tail)
    _, high = _clopper_pearson(most_taken, outside, tail)
    return TradeOffCurve(
        taken / outside,
        missed / inside,
        np.stack([low, high]),
        _clopper_pearson(missed, inside, tail),
        confidence,
    )


def _clopper_pearson(counts: Counts, trials: int, tail: float) -> Array:
    """Returns limits (2, counts), each wrong with probability at most `tail`."""
    low = np.where(counts > 0, stats.beta.ppf(tail, counts, trials - counts + 1), 0.0)
    high = np.where(counts < trials, stats.beta.isf(tail, counts + 1, trials - counts), 1.0)
    return np.stack([low, high])
