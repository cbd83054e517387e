"""Privacy losses of a pair of distributions, from upper bounds on its curve δ(ε).

δ is convex in e^ε. So the chord of two upper bounds is an upper bound between them. The losses
computed here have a curve of chords, which dominates the pair ("connect the dots", Doroshenko et
al., 2022).
"""

from typing import TypeAlias

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair

Curve: TypeAlias = tuple[np.ndarray, np.ndarray]
"""ε, (m,) increasing from 0, and upper bounds on δ of P against Q and of Q against P, (2, m)."""

# e to this power counts as 0.
_LEAST_LOG = -700.0
# The largest grid of losses, about a gigabyte of arrays.
_MOST_LOSSES = 10_000_000


def chords(epsilons: np.ndarray, deltas: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Returns upper bounds on δ at each ε of `at`, (…, n).

    Args:
      epsilons: (m,) increasing.
      deltas: (…, m) upper bounds on δ, decreasing. The last one holds for every larger ε.
      at: (n,) at least `epsilons[0]`.
    """
    left = np.clip(np.searchsorted(epsilons, at, "right") - 1, 0, len(epsilons) - 2)
    width = epsilons[left + 1] - epsilons[left]
    # The chord is straight in e^ε, not in ε. Without `minimum`, it would fall below δ at the end.
    share = np.expm1(np.minimum(at - epsilons[left], width)) / np.expm1(width)
    return deltas[..., left] + share * (deltas[..., left + 1] - deltas[..., left])


def losses(epsilons: np.ndarray, deltas: np.ndarray, interval: float) -> pld_pmf.DensePLDPmf:
    """Returns losses on multiples of the interval whose curve is at least the given one.

    Args:
      epsilons: (m,) increasing.
      deltas: (m,) upper bounds on δ, decreasing.
      interval: h.

    Raises:
      ValueError: the grid is too large.
    """
    first, last = int(np.ceil(epsilons[0] / interval)), int(np.ceil(epsilons[-1] / interval))
    check_size((last - first) * interval, interval)
    # A chord has two ends.
    last = max(first + 1, last)
    at = interval * np.arange(first, last + 1)
    # δ decreases in ε, so a bound at a smaller ε also holds here.
    bounds = np.minimum.accumulate(np.clip(chords(epsilons, deltas, at), 0.0, 1.0))
    found = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, bounds)
    return found.to_dense_pmf()


def least_complement(u: np.ndarray, rest: np.ndarray, curve: Curve) -> np.ndarray:
    """Returns at most 1 − G(u), precise also if it is small; `rest` is 1 − u.

    G(u) is the largest P(E) of a set E with Q(E) ≤ u.

    P(E) ≤ δ + e^ε Q(E),    1 − P(E) ≥ e^−ε (1 − Q(E) − δ′)
    """
    found = np.zeros_like(u)
    for odds, forward, backward in zip(np.exp(curve[0]), *curve[1], strict=True):
        found = np.maximum(found, 1.0 - forward - odds * u)
        found = np.maximum(found, (rest - backward) / odds)
    return found


def convex(epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """Returns the least δ that bounds at other ε imply, (m,).

    Args:
      epsilons: (m,) increasing from 0.
      deltas: (m,) upper bounds on δ in both directions.

    δ is convex in e^ε, is at most 1, and is 1 − e^ε (1 − δ(−ε)) at negative ε.
    """
    negative = -epsilons[:0:-1]
    mirrored = 1.0 - np.exp(negative) * (1.0 - deltas[:0:-1])
    logs = np.concatenate([[_LEAST_LOG], negative, epsilons])
    bounds = np.minimum(np.concatenate([[1.0], mirrored, deltas]), 1.0)
    # The lower corners of a decreasing curve are the upper ones of its negative.
    high, low = corners(-bounds, np.exp(logs))
    # `low` holds the e^ε of the corners, so these are their places in `logs`.
    kept = np.searchsorted(np.exp(logs), low)
    return np.minimum(deltas, chords(logs[kept], -high, epsilons))


def reverse(curve: Curve) -> Curve:
    """Returns the curve with P and Q exchanged."""
    return curve[0], curve[1][::-1]


def check_size(width: float, interval: float) -> None:
    """Raises a `ValueError` if the grid of losses would be too large."""
    if width > _MOST_LOSSES * interval:
        raise ValueError(
            f"The privacy losses must be at most {_MOST_LOSSES * interval:g}, got {width:.3g}, so "
            "no useful ε is known. Use more noise, or `dpoptax.users` for records of one person."
        )


def symmetric(above: pld_pmf.DensePLDPmf, interval: float) -> Pair:
    """Returns the pair with the positive losses `above` in both directions.

    A loss −ℓ has e^−ℓ times the probability of ℓ, and the rest of the probability is at 0. If the
    bounds leave no rest, the probabilities add up to more than 1, which claims less privacy.
    """
    first = max(1, above._lower_loss)
    positive = above._probs[first - above._lower_loss :]
    negative = positive * np.exp(-interval * (first + np.arange(len(positive))))
    same = max(0.0, 1.0 - positive.sum() - negative.sum() - above._infinity_mass)
    # The grid has no holes, but no mass between 0 and the first positive loss either.
    gap = np.zeros(first - 1)
    masses = np.concatenate([negative[::-1], gap, [same], gap, positive])
    pmf = pld_pmf.DensePLDPmf(interval, -(len(masses) // 2), masses, above._infinity_mass, True)
    return Pair(pmf)


def corners(high: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points that maximize high − r low for some r ≥ 0, by increasing `low`."""
    # The upper convex hull, by one sweep: a point below the line between its neighbors is dropped.
    kept: list[int] = []
    for i in np.lexsort((-high, low)):
        # Its `low` is not smaller than that of the last one, so it is never better for r ≥ 0.
        if kept and high[i] <= high[kept[-1]]:
            continue
        while len(kept) > 1:
            before, last = kept[-2], kept[-1]
            rise = (high[i] - high[before]) * (low[last] - low[before])
            if rise < (high[last] - high[before]) * (low[i] - low[before]):
                break
            kept.pop()
        kept.append(int(i))
    return high[kept], low[kept]
