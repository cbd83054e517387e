"""Prices for several records of one person.

The neighbors differ in k records: all are added, removed or replaced. The proofs are in
docs/developers/pricing.md, under "Several records".
"""

import math
from collections.abc import Callable

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair
from scipy import optimize, special, stats

from dpoptax._pricing import curves
from dpoptax._pricing.custom_events import cut_event
from dpoptax._pricing.events import (
    CustomDpEvent,
    GroupDpEvent,
    composition_of,
    full_probability,
    gaussian_event,
    parts_of,
)

# Probabilities below this become infinite losses. A sum of 10^6 steps adds 10^-14 to δ.
_RARE, _LEAST_PROBABILITY = 1e-20, 1e-9
# The logarithm of the ratio of successive losses above 1. Chords are in between.
_APART = 1e-3


@attr.frozen
class SampledRecordsDpEvent(CustomDpEvent):
    """A noisy sum over a Poisson sample that may hold several records of one person.

    Attributes:
      noise_multiplier: The standard deviation of the noise, in units of a record's contribution.
      probability: The probability that a record is drawn.
      records: The number of records of the person.
    """

    noise_multiplier: float
    probability: float
    records: int

    def pair(self, relation: dpa.NeighboringRelation, interval: float) -> Pair:
        """Returns the losses of Σ_j Binomial(k, q)(j) N(j, σ²) against N(0, σ²), both ways."""
        drawn = np.arange(self.records + 1)
        # The price increases with q. The losses of smaller ones are below the grid's resolution.
        probability = max(self.probability, _LEAST_PROBABILITY)
        weights = stats.binom.pmf(drawn, self.records, probability)
        mixture = _Mixture(weights, self.noise_multiplier)
        logs, thresholds = mixture.grid(interval)
        removed = curves.losses(logs, mixture.above(thresholds), interval)
        added = curves.losses(-logs[::-1], mixture.below(thresholds)[::-1], interval)
        return Pair(removed, added)


def event_of_records(
    event: Event, records: int, relation: dpa.NeighboringRelation, *, literal: bool
) -> Event:
    """Returns the event for neighbors that differ in `records` records.

    Args:
      event: the releases, for neighbors that differ in one record.
      records: k.
      relation: the neighboring relation.
      literal: whether the event describes the draws, instead of bounding other ones. If not, or if
        a part cannot be priced for several records, the price is that of group privacy.
    """
    if records == 1:
        return event
    parts = [(_several(part, records, relation), count) for part, count in parts_of(event)]
    known = tuple((part, count) for part, count in parts if part is not None)
    if not literal or len(known) < len(parts):
        return GroupDpEvent(event, records)
    return composition_of(known)


def _several(event: Event, records: int, relation: dpa.NeighboringRelation) -> Event | None:
    """Returns the event of one release, or None if its price is not known.

    Under other relations than add-or-remove-one, a record that is replaced by one that adds zero
    may take part in other steps than the next.
    """
    if isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
        return event
    if isinstance(event, dpa.GaussianDpEvent):
        # Every sum contains all k records, and changes by at most k C.
        return gaussian_event(event.noise_multiplier / records)
    if relation is not dpa.NeighboringRelation.ADD_OR_REMOVE_ONE:
        return None
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        return _truncated(event, records)
    inner = getattr(event, "event", None)
    if isinstance(event, dpa.PoissonSampledDpEvent) and isinstance(inner, dpa.GaussianDpEvent):
        return SampledRecordsDpEvent(inner.noise_multiplier, event.sampling_probability, records)
    return None


def _truncated(event: dpa.TruncatedSubsampledGaussianDpEvent, records: int) -> Event:
    """Returns the event of Poisson samples that are cut, with several records of one person."""
    q, size = event.sampling_probability, event.dataset_size
    # A batch with j of the records is cut only if more than b − j others are drawn.
    b, drawn = event.truncated_batch_size, np.arange(1, records + 1)
    full = [full_probability(size, q, b - j + 1) for j in drawn.tolist()]
    overflow = float(stats.binom.pmf(drawn, records, q) @ np.asarray(full))
    return cut_event(SampledRecordsDpEvent(event.noise_multiplier, q, records), overflow)


def _places(low: float, high: float, interval: float) -> np.ndarray:
    """Returns multiples of the interval between two losses: all up to 1, and fewer above it."""
    most = max(1.0, -low, high)
    far = np.exp(np.arange(0.0, math.log(most) + _APART, _APART)) / interval
    places = np.unique(np.concatenate([np.arange(1 / interval), far]).astype(int))
    places = np.concatenate([-places[:0:-1], places])
    return places[(places > low / interval) & (places < high / interval)]


class _Mixture:
    """P = Σ_j w_j N(j, σ²) against Q = N(0, σ²), as functions of thresholds t.

    Numbers j of negligible weight are left out of P. Their weight is added to every δ of P, as if
    their loss were infinite. Without them, δ of Q against P can only grow.

    The likelihood ratio ℓ(x) increases. At ε = log ℓ(t), and at ε = −log ℓ(t) for Q against P,

        δ(ε) = P[x > t] − ℓ(t) Q[x > t],    δ(ε) = Q[x < t] − P[x < t] / ℓ(t).
    """

    def __init__(self, weights: np.ndarray, sigma: float) -> None:
        tails = np.cumsum(weights[::-1])[::-1]
        # `tails` decrease, so the first j are likely. With only j = 0, ℓ would be constant.
        possible = np.flatnonzero(weights > 0)
        likely = possible[: max(2, int(np.sum(tails[possible] > _RARE)))]
        self._parts = [(float(j), float(weights[j])) for j in likely]
        self._sigma, self._rest = sigma, float(weights[likely[-1] + 1 :].sum())

    def grid(self, interval: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns log ℓ(t), increasing and about on multiples of the interval, and t."""
        coarse = np.linspace(*self.range(), 20_001)
        ratios = self.log_ratio(coarse)
        curves.check_size(ratios[-1] - ratios[0], interval)
        on_grid = interval * _places(ratios[0], ratios[-1], interval)
        # Only the places of thresholds are interpolated. The curve is computed exactly at them.
        inner = np.interp(on_grid, ratios, coarse)
        thresholds = np.unique(np.concatenate([coarse[[0]], inner, coarse[[-1]]]))
        logs = self.log_ratio(thresholds)
        # Points that are closer would make a chord from the rounding of two equal numbers.
        increasing = np.diff(logs, prepend=-np.inf) > 1e-3 * interval
        return logs[increasing], thresholds[increasing]

    def range(self) -> tuple[float, float]:
        """Returns thresholds that x exceeds, or falls below, with probability `_RARE`."""
        far = -special.ndtri(_RARE) * self._sigma

        def excess(t: float) -> float:
            logs = [math.log(w) + special.log_ndtr((j - t) / self._sigma) for j, w in self._parts]
            return float(special.logsumexp(logs)) - math.log(_RARE)

        return -far, optimize.brentq(
            excess, -far, self._parts[-1][0] + far + self._sigma, xtol=1e-3
        )

    def log_ratio(self, t: np.ndarray) -> np.ndarray:
        """Returns log ℓ(t)."""
        found = np.full_like(t, -np.inf)
        for j, weight in self._parts:
            # N(j, σ²) has e^(j (t − j/2)/σ²) times the density of N(0, σ²) at t.
            found = np.logaddexp(found, math.log(weight) + j * (t - j / 2) / self._sigma**2)
        return found

    def above(self, t: np.ndarray) -> np.ndarray:
        """Returns P[x > t] − ℓ(t) Q[x > t]; the terms of j = 0 cancel."""
        tail = special.log_ndtr(-t / self._sigma)
        return self._rest + self._sum(
            lambda j: np.exp(special.log_ndtr((j - t) / self._sigma)),
            lambda j: np.exp(j * (t - j / 2) / self._sigma**2 + tail),
        )

    def below(self, t: np.ndarray) -> np.ndarray:
        """Returns Q[x < t] − P[x < t] / ℓ(t); the terms of j = 0 cancel."""
        tail, ratio = special.log_ndtr(t / self._sigma), self.log_ratio(t)
        # As ℓ(t) = Σ_j w_j ℓ_j(t), the difference is a sum over j as well.
        return self._sum(
            lambda j: np.exp(j * (t - j / 2) / self._sigma**2 + tail - ratio),
            lambda j: np.exp(special.log_ndtr((t - j) / self._sigma) - ratio),
        )

    def _sum(
        self, more: Callable[[float], np.ndarray], less: Callable[[float], np.ndarray]
    ) -> np.ndarray:
        """Returns Σ_{j ≥ 1} w_j (more − less)⁺."""
        # No term is negative, since each likelihood ratio increases. This only cuts off rounding.
        terms = (w * np.maximum(more(j) - less(j), 0.0) for j, w in self._parts if j)
        return np.asarray(sum(terms))
