"""Privacy events of noisy gradient sums: what a mechanism does, for an accountant to price."""

import math
from collections.abc import Callable, Sequence

import attr
import dp_accounting as dpa
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event

from dpoptax._pricing import random_allocation, renyi
from dpoptax._pricing.participation_chains import Chain

RELATIONS = {
    "add-or-remove-one": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
    "replace-special": dpa.NeighboringRelation.REPLACE_SPECIAL,
}
# Beyond these dp_accounting divides by zero or overflows. Less noise than the first counts as none,
# epsilon being in the hundred thousands, and more than the second as the second.
MULTIPLIERS = (1e-3, 1e6)


@attr.frozen
class WorstOfDpEvent(dpa.DpEvent):
    """One of several events happens, which one is nobody's secret but was drawn without the data.

    A mixture with public weights costs no more than the costliest part, order by order of Renyi
    divergence (quasi-convexity).

    Attributes:
      events: The events, a tuple.
    """

    events: tuple[Event, ...]


@attr.frozen
class RandomAllocationDpEvent(dpa.DpEvent):
    """Of `period` noisy sums a record is in one, uniformly chosen; the first `steps` are released.

    Gaussian noise of standard deviation `noise_multiplier`, in units of what a record adds.

    Attributes:
      noise_multiplier: Of each sum.
      period: T.
      steps: How many of the T sums were released.
      overflow: An upper bound on the probability that other records fill one of these batches.
    """

    noise_multiplier: float
    period: int
    steps: int
    overflow: float = 0.0


@attr.frozen
class ParticipationDpEvent(dpa.DpEvent):
    """Sums with correlated noise C⁻¹Z, in which a record takes part by chance.

    Gaussian noise Z of standard deviation `noise_multiplier`, in units of what a record adds.

    Attributes:
      noise_multiplier: Of Z.
      column: The first column of C, without zeros at its end.
      chain: When a record takes part.
      steps: How many sums were released.
      bound: What reveals no less and can be composed: what "pld" and "rdp" price in its place.
      overflow: An upper bound on the probability that other records fill one of the batches.
    """

    noise_multiplier: float
    column: tuple[float, ...]
    chain: Chain
    steps: int
    bound: Event
    overflow: float = 0.0


@attr.frozen
class CutDpEvent(dpa.DpEvent):
    """What `event` reveals, had no batch been cut.

    Where one was, a record that was drawn took the place of another's.

    Attributes:
      event: The releases, of batches of any size.
      overflow: An upper bound on the probability that other records fill a batch, above 0.
    """

    event: Event
    overflow: float


def gaussian_event(noise_multiplier: float) -> Event:
    """One release with Gaussian noise, as far from the ends as dp_accounting wants it."""
    if noise_multiplier < MULTIPLIERS[0]:
        return dpa.NonPrivateDpEvent()
    return dpa.GaussianDpEvent(min(float(noise_multiplier), MULTIPLIERS[1]))


def joint_multiplier(multipliers: Sequence[float]) -> float:
    """Of the one Gaussian release that several are together: (Σ σ⁻²)^(-1/2)."""
    if len(multipliers) == 1:
        return multipliers[0]
    if 0 in multipliers:
        return 0.0
    precision = math.fsum(sigma**-2 for sigma in multipliers)
    return precision**-0.5 if precision else math.inf


def noisy_sum_event(
    noise_multiplier: float, steps: int, sampled: Callable[[Event], Event]
) -> Event:
    """The event of `steps` noisy clipped sums; `sampled` wraps one Gaussian in its sampling."""
    if steps == 0 or math.isinf(noise_multiplier):
        return dpa.NoOpDpEvent()
    gaussian = gaussian_event(noise_multiplier)
    if isinstance(gaussian, dpa.NonPrivateDpEvent):
        return gaussian
    return dpa.SelfComposedDpEvent(sampled(gaussian), steps)


def poisson_event(noise_multiplier: float, sampling_probability: float, steps: int) -> Event:
    """The event of `steps` noisy sums over Poisson samples of unbounded size."""
    if sampling_probability == 0:
        return dpa.NoOpDpEvent()

    def sampled(gaussian: Event) -> Event:
        if sampling_probability == 1:
            return gaussian
        return dpa.PoissonSampledDpEvent(float(sampling_probability), gaussian)

    return noisy_sum_event(noise_multiplier, steps, sampled)


def truncated_poisson_event(
    noise_multiplier: float, steps: int, *, size: int, probability: float, cut_to: int
) -> Event:
    """The event of `steps` noisy sums over Poisson samples of `size` records, cut to `cut_to`."""
    if cut_to >= size:
        return poisson_event(noise_multiplier, probability, steps)
    return noisy_sum_event(
        noise_multiplier,
        steps,
        lambda gaussian: dpa.TruncatedSubsampledGaussianDpEvent(
            dataset_size=size,
            sampling_probability=probability,
            truncated_batch_size=cut_to,
            noise_multiplier=gaussian.noise_multiplier,
        ),
    )


def allocation_event(
    noise_multiplier: float, steps: int, *, period: int, participations: int, overflow: float
) -> Event:
    """The event of `steps` noisy sums, a record being in exactly k of each T = `period` of them.

    For k > 1 each period costs k times one of ⌊T/k⌋: a uniform set of k steps is drawn by drawing
    k blocks of ⌊T/k⌋ steps each, uniformly and without the data, and a step of each block; and a
    mixture costs no more than what all its parts cost (Feldman and Shenfeld, 2025). A part of
    such a period is priced as the whole.

    Args:
      noise_multiplier: Over the clip bound.
      steps: Number of releases, from the first of a period on.
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
    lowest, highest = random_allocation.MULTIPLIERS

    def part(released: int) -> Event:
        if block == 1 or noise_multiplier < lowest:
            # One sum, whichever it is: what a full batch leaves out does not depend on the data.
            event = gaussian_event(noise_multiplier)
        else:
            event = RandomAllocationDpEvent(
                noise_multiplier=min(float(noise_multiplier), highest),
                period=block,
                steps=released,
                overflow=(released if exactly_once else period / participations) * overflow,
            )
        return event if exactly_once else dpa.SelfComposedDpEvent(event, participations)

    whole, rest = divmod(steps, period)
    parts = [dpa.SelfComposedDpEvent(part(block), whole)] if whole else []
    if rest:
        parts.append(part(rest if exactly_once else block))
    return parts[0] if len(parts) == 1 else dpa.ComposedDpEvent(parts)


def separated_event(
    noise_multiplier: float, steps: int, *, probability: float, separation: int, overflow: float
) -> Event:
    """What bounds `steps` noisy sums, a record being in one by chance, never twice within b.

    By Poisson sampling: whatever came before, the chance of a step is p or 0. With p = 1 nothing is
    left to chance but the first step, which is given away, and which batches are cut with it.

    Args:
      noise_multiplier: Over the clip bound.
      steps: Number of releases.
      probability: p, of a record that may take part.
      separation: b.
      overflow: The probability that other records fill one step's batch.
    """
    if probability == 1:
        return poisson_event(noise_multiplier, 1.0, -(-steps // separation))
    event = poisson_event(noise_multiplier, probability, steps)
    if not overflow or isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
        return event
    return CutDpEvent(event, min(1.0, steps * overflow))


def with_others(event: Event, also: Sequence[Event]) -> Event:
    """The event composed with others on the same data."""
    # What can be read but once, such as a generator, would be empty where the event is made.
    if not isinstance(also, Sequence) or not all(isinstance(other, Event) for other in also):
        raise TypeError(
            f"also={also!r}: want a sequence of dp_accounting events, such as [vocabulary.event]"
        )
    return dpa.ComposedDpEvent([event, *also]) if also else event


def participation_event(
    noise_multiplier: float,
    steps: int,
    *,
    column: tuple[float, ...],
    chain: Chain,
    bound: Event,
    overflow: float,
) -> Event:
    """The event of `steps` noisy sums; `bound` itself where that is nothing or all.

    Args:
      noise_multiplier: Over the clip bound.
      steps: Number of releases, from the first on.
      column: The first column of C over these steps, see `shortest`.
      chain: When a record takes part.
      bound: What reveals no less.
      overflow: The probability that other records fill one step's batch.
    """
    if isinstance(bound, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
        return bound
    return ParticipationDpEvent(
        noise_multiplier=float(noise_multiplier),
        column=column,
        chain=chain,
        steps=int(steps),
        bound=bound,
        overflow=min(1.0, steps * overflow),
    )


def shortest(column: Sequence[float]) -> tuple[float, ...]:
    """The column without the zeros at its end."""
    last = max(i for i, entry in enumerate(column) if entry)
    return tuple(float(entry) for entry in column[: last + 1])


def over_parts(event: Event, change: Callable[[Event], Event]) -> Event:
    """The event with each of the events that it is made of changed; a basic one is as it is.

    Hashable where these are, so that what was priced can be kept.
    """
    if isinstance(event, dpa.ComposedDpEvent):
        if not isinstance(event.events, Sequence):
            raise TypeError(
                f"ComposedDpEvent(events={event.events!r}): want a list or a tuple; what can be "
                "read but once, such as a generator, is nothing to who asks again"
            )
        return attr.evolve(event, events=tuple(change(part) for part in event.events))
    if isinstance(event, WorstOfDpEvent):
        return WorstOfDpEvent(tuple(change(part) for part in event.events))
    if isinstance(getattr(event, "event", None), dpa.DpEvent) and attr.has(type(event)):
        return attr.evolve(event, event=change(event.event))
    return event


def hashable(event: Event) -> Event:
    """The event with a tuple in the place of each list that is composed."""
    return over_parts(event, hashable)


def bounded(event: Event) -> Event:
    """The event with what is priced by Monte Carlo alone replaced by what bounds it."""
    return event.bound if isinstance(event, ParticipationDpEvent) else over_parts(event, bounded)


def rewrite(event: Event, leaf: Callable[[Event], Event]) -> Event:
    """The event with `leaf` applied to every basic event, from the inside out."""
    wrappers = (
        dp_event.RepeatAndSelectDpEvent,
        dpa.SelfComposedDpEvent,
        dpa.PoissonSampledDpEvent,
        dpa.SampledWithoutReplacementDpEvent,
        CutDpEvent,
    )
    if hasattr(event, "event") and not isinstance(event, wrappers):
        raise ValueError(
            f"event={event} is of a kind that is not accounted for here; use Gaussian noise under "
            "composition, Poisson sampling or sampling without replacement"
        )
    return leaf(over_parts(event, lambda part: rewrite(part, leaf)))


def without_truncation(event: Event, count: float = 1) -> tuple[Event, float]:
    """Returns the event with unbounded batches, and what this leaves out of δ.

    If the event with unbounded batches is (ε, δ)-DP, the event is (ε, δ + p)-DP for the second
    value, p. Let F be that in some step the other records fill the batch and the target is drawn.
    A neighbor without the target flips the same coin for it. So F has one probability, at most p,
    under both neighbors, and

        P[M(D) ∈ S] ≤ p + P[M(D) ∈ S, not F] ≤ p + e^ε P[M(D') ∈ S, not F] + δ.

    The last step reveals which other records are drawn, and the coins of steps that they fill. If F
    did not happen, such steps show the same of both neighbors, and no other step cuts its batch.
    Where the coins of several steps depend on each other, F is that the others fill any batch.

    Random repetitions are at most p times their mean. Given that F did not happen, their number has
    a law of the same kind with a lesser mean, for which selection costs no more.
    """
    if isinstance(event, dp_event.RepeatAndSelectDpEvent):
        plain, overflow = without_truncation(event.event, count * event.mean)
        return attr.evolve(event, event=plain), overflow
    if isinstance(event, WorstOfDpEvent):
        parts = [without_truncation(e, count) for e in event.events]
        return WorstOfDpEvent(tuple(e for e, _ in parts)), max(p for _, p in parts)
    if isinstance(event, dpa.SelfComposedDpEvent):
        plain, overflow = without_truncation(event.event, count * event.count)
        return attr.evolve(event, event=plain), overflow
    if isinstance(event, dpa.ComposedDpEvent):
        parts = [without_truncation(e, count) for e in event.events]
        return dpa.ComposedDpEvent([e for e, _ in parts]), math.fsum(p for _, p in parts)
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        q, sigma = event.sampling_probability, event.noise_multiplier
        full = renyi.full_probability(event.dataset_size, q, event.truncated_batch_size)
        return dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)), count * q * full
    if isinstance(event, RandomAllocationDpEvent):
        return attr.evolve(event, overflow=0.0), count * event.overflow
    if isinstance(event, CutDpEvent):
        plain, overflow = without_truncation(event.event, count)
        return plain, overflow + count * event.overflow
    return event, 0.0


def overflows(event: Event) -> bool:
    """Whether a part of the event has batches that may be full, which only δ can pay for."""
    found = []

    def look(part: Event) -> Event:
        kinds = RandomAllocationDpEvent, CutDpEvent
        found.append(isinstance(part, kinds) and part.overflow > 0)
        return part

    rewrite(event, look)
    return any(found)


def allocation_as_poisson(event: Event) -> Event:
    """What random allocation costs nearly, and takes no time to price."""
    if isinstance(event, RandomAllocationDpEvent):
        gaussian = dpa.GaussianDpEvent(event.noise_multiplier)
        step = dpa.PoissonSampledDpEvent(1 / event.period, gaussian)
        return dpa.SelfComposedDpEvent(step, event.steps)
    return event
