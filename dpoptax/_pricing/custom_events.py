"""Privacy events that dp_accounting lacks."""

import math
from collections.abc import Sequence

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair

from dpoptax._pricing import curves, random_allocation
from dpoptax._pricing.events import (
    MULTIPLIERS,
    CustomDpEvent,
    Uncut,
    composition_of,
    gaussian_event,
    noisy_sum_event,
    parts_of,
    unsupported,
    without_truncation,
)
from dpoptax._support.argument_checks import number


@attr.frozen
class WorstOfDpEvent(CustomDpEvent):
    """One of several events, by a public choice that does not depend on the data.

    A mixture with public weights costs at most as much as its costliest part, for each order of the
    Rényi divergence (quasi-convexity).

    Attributes:
      events: A tuple of events.
    """

    events: tuple[Event, ...]

    def uncut(self) -> Uncut:
        """Returns the event with unbounded batches, and the largest overflow."""
        found = [without_truncation(parts_of(event)) for event in self.events]
        plain = WorstOfDpEvent(tuple(composition_of(each.parts) for each in found))
        overflow = max(each.overflow for each in found)
        return Uncut(((plain, 1),), overflow, any(each.only_by_delta for each in found))


@attr.frozen
class StatedDpEvent(CustomDpEvent):
    """A release of which only (ε, δ) is known, such as a statistic of another library.

        P[M(D) ∈ S] ≤ e^ε P[M(D') ∈ S] + δ

    Pass it to `also`, or wrap it in a `PrivacyEvent` to name its unit and neighboring relation.
    Otherwise it must hold for those of the run. Its privacy loss is ±ε, and infinite with
    probability δ. Any release with this (ε, δ) is a function of a draw from this pair, so "pld"
    composes it tightly. "rdp" adds δ to that of the other releases.

    Attributes:
      epsilon: at least 0.
      delta: at least 0 and below 1.

    Raises:
      ValueError: a number is out of range.

    Source: Kairouz, Oh, Viswanath, "The composition theorem for differential privacy" (2015); proof
    in docs/developers/pricing.md.

    >>> import dpoptax
    >>> run = {"noise_multiplier": 1.0, "sampling_probability": 0.01, "steps": 1000}
    >>> planned = dpoptax.accounting.planned_guarantee(**run, also=[StatedDpEvent(0.5, 1e-6)])
    >>> round(planned.epsilon(1e-5), 2)
    2.28
    """

    epsilon: float
    delta: float = 0.0

    def __attrs_post_init__(self) -> None:
        if not 0 <= number("epsilon", self.epsilon) < math.inf:
            raise ValueError(f"`epsilon` must be at least 0 and finite, got {self.epsilon}.")
        if not 0 <= number("delta", self.delta) < 1:
            raise ValueError(f"`delta` must be at least 0 and below 1, got {self.delta}.")

    def uncut(self) -> Uncut:
        """Returns the event without infinite losses, and their probability."""
        return Uncut(((StatedDpEvent(self.epsilon), 1),), self.delta)

    def pair(self, relation: dpa.NeighboringRelation, interval: float) -> Pair:
        """Returns the losses ±ε and infinity, with ε moved to the two grid points around it."""
        curves.check_size(self.epsilon, interval)
        # Two grid points whose likelihood ratios have the mean e^ε under Q.
        below = math.floor(self.epsilon / interval)
        up = math.expm1(self.epsilon - below * interval) / math.expm1(interval)
        share = np.clip([1 - up, up], 0.0, 1.0) * (1 - self.delta)
        # Q has the mass (1 − δ)/(1 + e^ε) at ε, and P has e^x times the mass of Q at a loss of x.
        losses = interval * np.array([below, below + 1])
        masses = share * np.exp(losses - np.logaddexp(0.0, self.epsilon))
        above = pld_pmf.DensePLDPmf(interval, below, masses, self.delta, True)
        return curves.symmetric(above, interval)


@attr.frozen
class RandomAllocationDpEvent(CustomDpEvent):
    """The first `steps` of `period` noisy sums, with a record in a random one.

    Attributes:
      noise_multiplier: The standard deviation of the Gaussian noise of each sum, in units of a
        record's contribution.
      period: T.
      steps: The number of released sums.
      edge_multiplier: The noise multiplier of two of at least three sums, if it differs.
    """

    noise_multiplier: float
    period: int
    steps: int
    edge_multiplier: float | None = None

    def pair(self, relation: dpa.NeighboringRelation, interval: float) -> Pair:
        """Returns the privacy loss of the sums."""
        if relation is dpa.NeighboringRelation.REPLACE_ONE:
            raise unsupported(self, "a record is replaced by one that contributes zero")
        fine = interval <= random_allocation.FINE_INTERVAL
        points = random_allocation.POINTS if fine else random_allocation.COARSE_POINTS
        run = self.noise_multiplier, self.period, self.steps
        return random_allocation.pair(*run, interval, points, self.edge_multiplier)

    def similar(self) -> Event:
        """Returns Poisson samples with the same probability."""
        gaussian = dpa.GaussianDpEvent(self.noise_multiplier)
        step = dpa.PoissonSampledDpEvent(1 / self.period, gaussian)
        return dpa.SelfComposedDpEvent(step, self.steps)


@attr.frozen
class CutDpEvent(CustomDpEvent):
    """The event `event` with batches that may be cut.

    In a cut batch, the drawn record replaces another one.

    Attributes:
      event: The releases, over batches of unbounded size.
      overflow: An upper bound on the probability that other records fill a batch, above 0.
    """

    event: Event
    overflow: float

    def uncut(self) -> Uncut:
        """Returns the event over unbounded batches; only δ can cover the overflow."""
        plain, overflow, _ = without_truncation(parts_of(self.event))
        return Uncut(plain, overflow + self.overflow, only_by_delta=True)


def allocation_event(
    noise_multiplier: float, steps: int, *, period: int, participations: int, overflow: float
) -> Event:
    """Returns the event of `steps` noisy sums with each record in k of every T.

    For k > 1 each period costs at most k times a period of ⌊T/k⌋ steps with k = 1
    (docs/developers/pricing.md, "Random allocation"). An incomplete period is then priced as a
    complete one.

    Args:
      noise_multiplier: Relative to the clipping bound.
      steps: Number of releases, from the start of a period on.
      period: T.
      participations: k.
      overflow: The probability that other records fill one step's batch.
    """
    if steps == 0 or math.isinf(noise_multiplier):
        return dpa.NoOpDpEvent()
    if noise_multiplier < MULTIPLIERS[0]:
        return dpa.NonPrivateDpEvent()
    block = period // participations
    exactly_once = participations == 1
    lowest, highest = random_allocation.AMPLIFIED_MULTIPLIERS

    def part(released: int) -> Event:
        if block == 1 or noise_multiplier < lowest:
            # Reveals the step of the record, which is then in one known sum. The omissions of a
            # full batch do not depend on the data.
            event = gaussian_event(noise_multiplier)
        else:
            sums = RandomAllocationDpEvent(min(float(noise_multiplier), highest), block, released)
            # The k parts together get the overflow of the T steps of a period.
            cuts = (released if exactly_once else period / participations) * overflow
            event = cut_event(sums, cuts)
        return event if exactly_once else dpa.SelfComposedDpEvent(event, participations)

    whole, rest = divmod(steps, period)
    parts = [dpa.SelfComposedDpEvent(part(block), whole)] if whole else []
    if rest:
        parts.append(part(rest if exactly_once else block))
    return parts[0] if len(parts) == 1 else dpa.ComposedDpEvent(parts)


def banded_allocation_event(
    noise_multiplier: float, steps: int, *, column: Sequence[float], period: int, overflow: float
) -> Event:
    """Returns an event that reveals at least as much as sums with banded noise.

    Each record is in one of T steps. If its step modulo b is revealed, with b bands, the columns of
    A at its possible steps are orthogonal, except those next to the ends of the period
    (docs/developers/pricing.md, "Banded noise, once a period").

    Args:
      noise_multiplier: Relative to the clipping bound.
      steps: Number of releases, from step 0 on.
      column: The first column of A, without trailing zeros and negative entries; at most T/3 long.
      period: T.
      overflow: The probability that other records fill one step's batch.
    """
    if steps == 0 or math.isinf(noise_multiplier):
        return dpa.NoOpDpEvent()
    # m, the number of periods, and Σ_j a_j a_{j+d} by d: first κ, and ρ is the greatest other one.
    slots, periods = period // len(column), -(-steps // period)
    shifted = [float(np.dot(column[d:], column[: len(column) - d])) for d in range(len(column))]
    inner = noise_multiplier / math.sqrt(shifted[0])
    # A single period has no steps next to those of another one, so ρ does not count.
    near = max(shifted[1:], default=0.0) if periods > 1 else 0.0
    edge = noise_multiplier / math.sqrt(shifted[0] + near)
    lowest, highest = random_allocation.AMPLIFIED_MULTIPLIERS
    if edge < lowest:
        # Reveals the steps of the record. The omissions of a full batch do not depend on the data.
        return noisy_sum_event(edge, periods)
    edges = min(edge, highest) if periods > 1 else None
    sums = RandomAllocationDpEvent(min(inner, highest), slots, slots, edges)
    return dpa.SelfComposedDpEvent(cut_event(sums, period * overflow), periods)


def cut_event(event: Event, overflow: float) -> Event:
    """Returns the event with batches that are full with probability `overflow`."""
    if not overflow or isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
        return event
    return CutDpEvent(event, min(1.0, overflow))
