"""Trade-off functions: lower bounds on the error rates of any test, and the least μ."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

from dpoptax._support.argument_checks import number

# The relative tolerance of μ, the largest μ, and the points between two pairs of a profile.
_TOLERANCE, _MOST_MU, _FINER = 2e-5, 1e3, 100
_MOST_EPSILON = 700.0  # e^ε of more overflows a double


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Lower bound on the error rates of any test for the presence of a record.

        false-negative rate ≥ f(false-positive rate),   f convex, decreasing, and its own inverse

    Since f is its own inverse, the bound holds for adding and for removing a record.

    Attributes:
      name: the bound in words.
      curve: α ↦ f(α), elementwise.

    Source: Dong, Roth, Su, "Gaussian differential privacy", 2019.
    """

    name: str
    curve: Callable[[NDArray[np.float64]], NDArray[np.float64]]

    def __call__(self, false_positive_rate: ArrayLike) -> NDArray[np.float64]:
        """Returns f, the least false-negative rates at these false-positive rates.

        Raises:
          ValueError: a rate is outside of [0, 1].
        """
        alpha = np.asarray(false_positive_rate, np.float64)
        if not np.all((alpha >= 0) & (alpha <= 1)):
            raise ValueError(f"`false_positive_rate` must be in [0, 1], got {alpha}.")
        return self.curve(alpha)


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

    def curve(alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        return special.ndtr(-special.ndtri(alpha) - mu)

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
    # The other pairs are left out, since e^ε overflows. Fewer pairs still prove a lower bound.
    proven = epsilons < math.log(np.finfo(np.float64).max)
    growth, slack = np.exp(epsilons[proven]), deltas[proven]

    def curve(alpha: NDArray[np.float64]) -> NDArray[np.float64]:
        alpha = alpha[..., None]
        lines = np.concatenate([1 - slack - growth * alpha, (1 - alpha - slack) / growth], axis=-1)
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
    at = np.interp(np.arange(0, last, 1 / _FINER), np.arange(last + 1), epsilons[: last + 1])
    # δ is convex in e^ε, so it is below its chords.
    bounds = np.interp(np.exp(at), np.exp(epsilons[: last + 1]), deltas[: last + 1]) - delta
    ends = np.append(at[1:], epsilons[last])

    def room(mu: float) -> float:
        # Both curves fall: the bound at one ε holds up to the next, where the Gaussian's is least.
        return float(np.min(_gaussian_deltas(mu, ends) - bounds))

    high = 1.0
    while room(high) < 0:
        high *= 2
        if high > _MOST_MU:
            return math.inf
    # `room` increases with μ. A root found from below is moved up by more than the tolerance.
    found = optimize.bisect(room, 1e-300, high, xtol=_TOLERANCE * high)
    return float(found if room(found) >= 0 else found + 2 * _TOLERANCE * high)


def _gaussian_deltas(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """Returns δ of N(μ, 1) against N(0, 1) at each ε."""
    with np.errstate(over="ignore"):
        scaled = epsilons / mu
    above = special.ndtr(mu / 2 - scaled)
    return above - np.exp(epsilons + special.log_ndtr(-mu / 2 - scaled))
