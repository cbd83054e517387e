"""The least μ of Gaussian differential privacy that a privacy profile allows."""

import math

import dp_accounting as dpa
import numpy as np
from scipy import special

from dpoptax._pricing import accountants

# The grid of the privacy loss for a whole curve is ten times as coarse as for a stated ε. It is
# rounded in the same direction, so the curve claims less privacy.
_INTERVAL = 10 * accountants.DISCRETIZATION
_TOLERANCE, _MOST_MU = 1e-4, 1e3
_MOST_EPSILON = 700.0  # e^ε of more overflows a double


def privacy_profile(
    event: dpa.DpEvent,
    relation: dpa.NeighboringRelation,
    least_delta: float = accountants.LEAST_DELTA,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of ε and δ that privacy loss distributions prove for an event."""
    return accountants.profile_of(event, relation, _INTERVAL, least_delta=least_delta)


def least_mu(epsilons: np.ndarray, deltas: np.ndarray, delta: float) -> float:
    """Returns the least μ for which the pairs prove f ≥ G_μ − `delta`.

    f is the trade-off function, and G_μ that of μ-Gaussian differential privacy.

    Raises:
      ValueError: no pair has a δ of at most `delta`.
    """
    if not np.isfinite(epsilons).all():
        return math.inf
    within = np.flatnonzero(deltas <= delta)
    if not within.size:
        raise ValueError(
            f"`delta` must be above the probability that the sampler's largest batch is full in "
            f"this run, got {delta}. Pass a larger `max_batch_size` or a larger `delta`."
        )
    last = within[0]  # δ decreases after it
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
