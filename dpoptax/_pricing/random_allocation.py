"""Privacy loss of random allocation: a record is in a secret one of T noisy sums.

The steps may be adaptive. They are post-processing of P = (1/T) Σ_i N(e_i, σ² I) against
Q = N(0, σ² I) in T dimensions, in units of the clipping bound. The likelihood ratio of P to Q is

    L(x) = (1/T) Σ_i w_i,    w_i = exp((2 x_i − 1)/(2σ²)).

The log w_i ~ N(−1/(2σ²), 1/σ²) are independent under Q, and E_Q[w_i] = 1. After the first n of the
T steps the ratio is (T − n + Σ_{i ≤ n} w_i)/T.

Each value of a sum is moved at random to the two grid points around it, with probabilities that
keep the mean. The resulting pair dominates the mechanism for every ε at once and under composition
(docs/developers/pricing.md, "Random allocation"). The only remaining error is that of double
precision, which is relative to the sum since all terms are positive.

Sources: Feldman and Shenfeld, "Privacy amplification by random allocation" (2025), for the pair
and the reduction to one of T; Doroshenko et al., "Connect the dots" (2022), for moving values.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy import special

# The grid of a law: points within 8.5 standard deviations on both sides, then one point per
# standard deviation up to 37, where double precision ends.
POINTS, COARSE_POINTS = 1000, 400
# Up to this interval of the privacy loss, all points are used.
FINE_INTERVAL = 1e-4
_BULK, _END = 8.5, 37.0
_TAIL = np.arange(_BULK + 0.5, _END + 1)
# The scores at which `_grid` knows the values of a sum.
_KNOTS = np.arange(-_END, _END + 0.25, 0.25)
# Amplification is not computed for less noise. More noise counts as the upper limit.
AMPLIFIED_MULTIPLIERS = (0.25, 1e5)
# Mass that the ends of the grid may lose.
_NEGLIGIBLE = 1e-22


class Law(NamedTuple):
    """Distribution under Q of a positive variable.

    Attributes:
      values: (n,) ascending.
      masses: (n,) probabilities.
    """

    values: np.ndarray
    masses: np.ndarray


@functools.lru_cache(maxsize=64)
def ratio_law(
    sigma: float, period: int, steps: int, points: int = POINTS, edge: float | None = None
) -> Law:
    """Returns the law of T L of a pair that dominates the first `steps` sums.

    Two of the sums have the noise multiplier `edge`, if it is given.
    """
    # With an edge there are at least three sums, so one or more are left for the doubling.
    single = _single(sigma, points)
    total = single
    # Doubles the number of terms, and adds one more where a bit below the leading one is set.
    for bit in bin(steps if edge is None else steps - 2)[3:]:
        total = _sum(total, total, points)
        if bit == "1":
            total = _sum(total, single, points)
    if edge is not None:
        outer = _single(edge, points)
        total = _sum(_sum(total, outer, points), outer, points)
    # The terms of the remaining steps are 1, without noise.
    return Law(total.values + (period - steps), total.masses)


def pair(
    sigma: float,
    period: int,
    steps: int,
    interval: float,
    points: int = POINTS,
    edge: float | None = None,
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy losses of the dominating pair on a grid."""
    values, masses = ratio_law(sigma, period, steps, points, edge)
    logs = np.log(values / period)
    # Moves each likelihood ratio to the two grid points around it, keeping the mean.
    below = np.floor(logs / interval).astype(int)
    up = np.clip(np.expm1(logs - below * interval) / math.expm1(interval), 0.0, 1.0)
    first = int(below.min())
    size = int(below.max()) - first + 2
    q = np.bincount(below - first, masses * (1 - up), size)
    q += np.bincount(below - first + 1, masses * up, size)
    # P has e^loss times the mass of Q. The sum of logarithms does not overflow where e^loss would.
    with np.errstate(divide="ignore"):
        p = np.exp(np.log(q) + interval * (np.arange(size) + first))
    # Q against P has the losses −x, so its grid is the reversed one.
    return privacy_loss_distribution.PrivacyLossDistribution(
        _pmf(p, first, interval), _pmf(q[::-1], -(first + size - 1), interval)
    )


def _single(sigma: float, points: int) -> Law:
    """Returns the law of w, log-normal, moved to grid points."""
    # z is log w in standard deviations from its mean under Q. The mean under P is 1/σ.
    shift = 1 / sigma
    z = _scores(points, shift)
    values = np.exp(z * shift - shift**2 / 2)
    q, p = _normal_masses(z), _normal_masses(z - shift)
    # Each cell has mass q and mean p/q, and is split between its ends. Only rounding is clipped.
    up = np.clip((p - values[:-1] * q) / np.diff(values), 0.0, q)
    masses = np.append(q - up, 0.0)
    masses[1:] += up
    return Law(values, masses)


def _scores(points: int, shift: float = 0.0) -> np.ndarray:
    """Returns scores from −37 to 37 + shift, dense from −8.5 to 8.5 + shift."""
    bulk = np.linspace(-_BULK, _BULK + shift, points)
    return np.concatenate([-_TAIL[::-1], bulk, _TAIL + shift])


def _normal_masses(z: np.ndarray) -> np.ndarray:
    """Returns the standard normal's mass in each cell, computed from the smaller tail."""
    low, high = z[:-1], z[1:]
    return np.where(
        low > 0, special.ndtr(-low) - special.ndtr(-high), special.ndtr(high) - special.ndtr(low)
    )


def _sum(first: Law, second: Law, points: int) -> Law:
    """Returns the law of the sum of two independent variables, moved to grid points."""
    grid = _grid(first, second, points)
    values = np.add.outer(first.values, second.values).ravel()
    masses = np.multiply.outer(first.masses, second.masses).ravel()
    # Each value goes to both ends of its cell in proportion, so its mean stays: no convex function
    # of the sum has a smaller mean afterwards.
    cell = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, len(grid) - 2)
    up = masses * np.clip((values - grid[cell]) / np.diff(grid)[cell], 0.0, 1.0)
    total = np.bincount(cell, masses - up, len(grid))
    total[1:] += np.bincount(cell, up, len(grid))[:-1]
    return Law(grid, total)


def _grid(first: Law, second: Law, points: int) -> np.ndarray:
    """Returns the grid of the sum's law: equidistant normal scores, and both ends.

    The scores are those of the mixture of P and Q, estimated from few points of each law. They
    affect the tightness of the bound, not its validity.
    """
    (a, p), (b, q) = _thinned(first), _thinned(second)
    values = np.add.outer(a, b).ravel()
    order = np.argsort(values)
    values, masses = values[order], np.multiply.outer(p, q).ravel()[order]
    # P has the likelihood ratio times the mass of Q.
    tilted = masses * values
    mixture = masses / masses.sum() / 2 + tilted / tilted.sum() / 2
    # Scores are computed from the smaller tail, which is precise where the other one is near 1.
    lower, upper = np.cumsum(mixture), np.cumsum(mixture[::-1])[::-1]
    score = np.where(
        lower < 0.5,
        special.ndtri(np.maximum(lower, 1e-310)),
        -special.ndtri(np.maximum(upper, 1e-310)),
    )
    # Sums of few points are clustered, so values are interpolated between a few scores.
    knots = np.interp(_KNOTS, np.maximum.accumulate(score), values)
    inner = np.interp(_scores(points), _KNOTS, knots)
    ends = first.values[[0, -1]] + second.values[[0, -1]]
    return np.unique(np.concatenate([ends, np.clip(inner, *ends)]))


def _thinned(law: Law, points: int = 200) -> Law:
    # Each cell of neighboring values becomes its mean, or its first value if it has no mass.
    edges = np.linspace(0, len(law.values), points + 1).astype(int)[:-1]
    masses = np.add.reduceat(law.masses, edges)
    means = np.add.reduceat(law.masses * law.values, edges) / np.maximum(masses, 1e-323)
    return Law(np.where(masses > 1e-300, means, law.values[edges]), masses)


def _pmf(masses: np.ndarray, first: int, interval: float) -> pld_pmf.PLDPmf:
    """Returns losses `interval` · (first, …), with negligible ends moved up.

    The upper end and the mass that rounding removes have an infinite loss.
    """
    low = int(np.searchsorted(np.cumsum(masses), _NEGLIGIBLE))
    high = len(masses) - int(np.searchsorted(np.cumsum(masses[::-1]), _NEGLIGIBLE))
    # Mass may only move to larger losses, which claims less privacy.
    kept = masses[low:high].copy()
    kept[0] += masses[:low].sum()
    # The difference from 1 does not resolve masses below 10^-16 in double precision.
    infinite = max(float(masses[high:].sum()), 1 - math.fsum(kept))
    return pld_pmf.DensePLDPmf(interval, first + low, kept, infinite, pessimistic_estimate=True)
