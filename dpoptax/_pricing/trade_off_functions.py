"""Trade-off functions: lower bounds on the error rates of any test, and the least μ."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from dpoptax._pricing.checks import number

_TOLERANCE, _MOST_MU = 1e-4, 1e3
_MOST_EPSILON = 700.0  # e^ε of more overflows a double


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Lower bound on the error rates of any test for the presence of a record.

        false-negative rate ≥ f(false-positive rate),   f convex, decreasing, and its own inverse

    Since f is its own inverse, the bound holds for adding and for removing a record.

    Attributes:
      name: the bound in words.
      curve: (α, 1 − α) ↦ f(α), elementwise; the smaller of the two arguments is precise.

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019.
    """

    name: str
    curve: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]

    def __call__(self, false_positive_rate: ArrayLike) -> NDArray[np.float64]:
        """Returns f, the least false-negative rates at these false-positive rates.

        Raises:
          ValueError: a rate is outside of [0, 1].
        """
        alpha = _probabilities("false_positive_rate", false_positive_rate)
        return self.curve(alpha, 1 - alpha)


def _probabilities(name: str, values: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(values, np.float64)
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"`{name}` must be in [0, 1], got {values}.")
    return values


def gaussian_trade_off(mu: float) -> TradeOff:
    """Returns the trade-off function of μ-Gaussian differential privacy.

        f(α) = Φ(Φ⁻¹(1 − α) − μ)

    This is the test of N(μ, 1) against N(0, 1). T sums with noise multiplier σ have μ = √T/σ.

    Raises:
      ValueError: μ is negative.

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019, definition 2.6.

    >>> gaussian_trade_off(1.0)([0.0, 0.1, 0.5]).round(3)
    array([1.   , 0.611, 0.159])
    """
    if not number("mu", mu) >= 0:
        raise ValueError(
            f"`mu` must be at least 0, got {mu}. It is √steps over the noise multiplier."
        )

    def curve(alpha: NDArray[np.float64], rest: NDArray[np.float64]) -> NDArray[np.float64]:
        quantile = np.where(alpha < rest, -special.ndtri(alpha), special.ndtri(rest))
        return special.ndtr(quantile - mu)

    return TradeOff(f"{mu:.3g}-GDP", curve)


def approximate_trade_off(epsilon: ArrayLike, delta: ArrayLike) -> TradeOff:
    """Returns the trade-off function of (ε, δ)-DP, or of several pairs that all hold.

        f(α) = max(0, 1 − δ − e^ε α, e^−ε (1 − δ − α)),   the largest over all pairs

    Args:
      epsilon: ε, a number or an array (pairs,); infinity claims nothing.
      delta: δ, of the same shape.

    Raises:
      ValueError: ε is negative, or δ is outside of [0, 1].

    Source: Wasserman, Zhou, "A statistical framework for differential privacy", 2010; Dong, Roth,
    Su, "Gaussian differential privacy", 2019, proposition 2.5.

    >>> approximate_trade_off(1.0, 1e-5)([0.0, 0.1, 0.5]).round(3)
    array([1.   , 0.728, 0.184])
    """
    epsilons, deltas = np.broadcast_arrays(
        np.atleast_1d(np.asarray(epsilon, np.float64)), np.asarray(delta, np.float64)
    )
    if not (np.all(epsilons >= 0) and np.all((deltas >= 0) & (deltas <= 1))):
        raise ValueError(
            f"`epsilon` must be at least 0 and `delta` in [0, 1], got {epsilons} and {deltas}."
        )
    proven = epsilons < math.log(np.finfo(np.float64).max)
    growth, slack = np.exp(epsilons[proven]), deltas[proven]

    def curve(alpha: NDArray[np.float64], rest: NDArray[np.float64]) -> NDArray[np.float64]:
        alpha, rest = alpha[..., None], rest[..., None]
        lines = np.concatenate([1 - slack - growth * alpha, (rest - slack) / growth], axis=-1)
        return np.max(lines, axis=-1, initial=0.0)

    pairs = f"({epsilons[0]:.3g}, {deltas[0]:.3g})" if len(epsilons) == 1 else "(ε(δ), δ)"
    return TradeOff(f"{pairs}-DP", curve)


def least_mu(epsilons: np.ndarray, deltas: np.ndarray, delta: float) -> float:
    """Returns the least μ for which the pairs prove f ≥ G_μ − `delta`.

    f is the trade-off function, and G_μ that of μ-Gaussian differential privacy. The result is
    infinite if no pair has a δ of at most `delta`.
    """
    within = np.flatnonzero((deltas <= delta) & np.isfinite(epsilons))
    if not within.size:
        return math.inf
    # Beyond the first such point, δ − `delta` is at most 0, which holds for every μ.
    last = within[0]
    if last == 0:
        return 0.0
    if epsilons[last] > _MOST_EPSILON:
        return math.inf
    epsilons, deltas = epsilons[: last + 1], deltas[: last + 1] - delta

    def holds(mu: float) -> bool:
        return _is_above(*_gaussian_deltas(mu, epsilons), deltas, np.exp(epsilons))

    low, high = 0.0, 1.0
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST_MU:
            return math.inf
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _is_above(values: np.ndarray, slopes: np.ndarray, deltas: np.ndarray, odds: np.ndarray) -> bool:
    """Returns whether a convex function of e^ε is above δ everywhere.

    δ is also convex in e^ε. Between two points, δ is below the chord of its bounds, and the
    function is above both of its tangents. The tangents are closest to the chord where they meet or
    at the points.

    Args:
      values: the values of the function at `odds`.
      slopes: its derivatives at `odds`.
      deltas: upper bounds on δ at `odds`.
      odds: e^ε.
    """
    width, bend = np.diff(odds), np.diff(slopes)
    with np.errstate(divide="ignore", invalid="ignore"):
        meet = np.clip((slopes[1:] * width - np.diff(values)) / bend, 0, width)
    meet = np.where(bend > 0, meet, 0)
    chords = deltas[:-1] + np.diff(deltas) / width * meet
    return bool(np.all(values >= deltas) and np.all(values[:-1] + slopes[:-1] * meet >= chords))


def _gaussian_deltas(mu: float, epsilons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns δ of N(μ, 1) against N(0, 1) at each ε, and its derivative by e^ε."""
    below = special.log_ndtr(-mu / 2 - epsilons / mu)
    deltas = special.ndtr(mu / 2 - epsilons / mu) - np.exp(epsilons + below)
    return deltas, -np.exp(below)
