"""Privacy events of noisy gradient sums, which accountants price."""

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
# Outside of this range, dp_accounting divides by zero or overflows. Less noise counts as none:
# ε is above 10^5 anyway. More noise counts as the upper limit.
MULTIPLIERS = (1e-3, 1e6)


@attr.frozen
class WorstOfDpEvent(dpa.DpEvent):
    """One of several events, by a public choice that does not depend on the data.

    A mixture with public weights costs at most as much as its costliest part, for each order of the
    Rényi divergence (quasi-convexity).

    Attributes:
      events: A tuple of events.
    """

    events: tuple[Event, ...]


@attr.frozen
class RandomAllocationDpEvent(dpa.DpEvent):
    """The first `steps` of `period` noisy sums, with a record in a random one.

    Attributes:
      noise_multiplier: The standard deviation of the Gaussian noise of each sum, in units of a
        record's contribution.
      period: T.
      steps: The number of released sums.
      overflow: An upper bound on the probability that other records fill one of these batches.
    """

    noise_multiplier: float
    period: int
    steps: int
    overflow: float = 0.0


@attr.frozen
class ParticipationDpEvent(dpa.DpEvent):
    """Sums with correlated noise A⁻¹Z, in which a record takes part at random.

    Attributes:
      noise_multiplier: The standard deviation of the Gaussian noise Z, in units of a record's
        contribution.
      column: The first column of A, without trailing zeros.
      chain: The law of a record's participations.
      steps: The number of released sums.
      bound: A composable event that reveals at least as much; "pld" and "rdp" price it.
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
    """The event `event` with batches that may be cut.

    In a cut batch, the drawn record replaces another one.

    Attributes:
      event: The releases, over batches of unbounded size.
      overflow: An upper bound on the probability that other records fill a batch, above 0.
    """

    event: Event
    overflow: float


@attr.frozen
class GroupDpEvent(dpa.DpEvent):
    """The releases of `event` for neighbors that differ in several records, by group privacy.

    Attributes:
      event: The releases, for neighbors that differ in one record.
      records: The number of records.
    """

    event: Event
    records: int


def gaussian_event(noise_multiplier: float) -> Event:
    """Returns the event of one Gaussian release, within the range of dp_accounting."""
    if noise_multiplier < MULTIPLIERS[0]:
        return dpa.NonPrivateDpEvent()
    return dpa.GaussianDpEvent(min(float(noise_multiplier), MULTIPLIERS[1]))


def joint_multiplier(multipliers: Sequence[float]) -> float:
    """Returns the multiplier (Σ σ⁻²)^(-1/2) of several joint Gaussian releases."""
    if len(multipliers) == 1:
        return multipliers[0]
    if 0 in multipliers:
        return 0.0
    precision = math.fsum(sigma**-2 for sigma in multipliers)
    return precision**-0.5 if precision else math.inf


def noisy_sum_event(
    noise_multiplier: float, steps: int, sampled: Callable[[Event], Event]
) -> Event:
    """Returns the event of `steps` noisy sums; `sampled` adds sampling to one."""
    if steps == 0 or math.isinf(noise_multiplier):
        return dpa.NoOpDpEvent()
    gaussian = gaussian_event(noise_multiplier)
    if isinstance(gaussian, dpa.NonPrivateDpEvent):
        return gaussian
    return dpa.SelfComposedDpEvent(sampled(gaussian), steps)


def poisson_event(noise_multiplier: float, sampling_probability: float, steps: int) -> Event:
    """Returns the event of `steps` noisy sums over Poisson samples of unbounded size."""
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
    """Returns the event of `steps` noisy sums over Poisson samples cut to `cut_to`."""
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
    """Returns the event of `steps` noisy sums with each record in k of every T.

    For k > 1 each period costs at most k times a period of ⌊T/k⌋ steps with k = 1. A uniform set of
    k steps can be drawn in two stages: k disjoint blocks of ⌊T/k⌋ steps, independently of the data,
    and then a step of each block. A mixture costs at most as much as its costliest part (Feldman
    and Shenfeld, 2025). If k > 1, an incomplete period is priced as a complete one.

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
    lowest, highest = random_allocation.MULTIPLIERS

    def part(released: int) -> Event:
        if block == 1 or noise_multiplier < lowest:
            # Reveals the step of the record, which is then in one known sum. The omissions of a
            # full batch do not depend on the data.
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
    """Returns an upper bound on `steps` noisy sums with minimum separation b.

    The bound is Poisson sampling: given earlier steps, the probability of a step is p or 0. If
    p = 1, only the first step is random. Revealing it also reveals which batches are cut.

    Args:
      noise_multiplier: Relative to the clipping bound.
      steps: Number of releases.
      probability: p, for a record that may take part.
      separation: b.
      overflow: The probability that other records fill one step's batch.
    """
    if probability == 1:
        return poisson_event(noise_multiplier, 1.0, -(-steps // separation))
    return cut_event(poisson_event(noise_multiplier, probability, steps), steps * overflow)


def cut_event(event: Event, overflow: float) -> Event:
    """Returns the event with batches that are full with probability `overflow`."""
    if not overflow or isinstance(event, dpa.NoOpDpEvent | dpa.NonPrivateDpEvent):
        return event
    return CutDpEvent(event, min(1.0, overflow))


def participation_event(
    noise_multiplier: float,
    steps: int,
    *,
    column: tuple[float, ...],
    chain: Chain,
    bound: Event,
    overflow: float,
) -> Event:
    """Returns the event of `steps` noisy sums, or a trivial `bound`.

    Args:
      noise_multiplier: Relative to the clipping bound.
      steps: Number of releases, from step 0 on.
      column: The first column of A over these steps; see `shortest`.
      chain: The law of a record's participations.
      bound: An event that reveals at least as much.
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
    """Returns the column without trailing zeros."""
    last = max(i for i, entry in enumerate(column) if entry)
    return tuple(float(entry) for entry in column[: last + 1])


def over_parts(event: Event, change: Callable[[Event], Event]) -> Event:
    """Returns the event with `change` applied to its parts, if it has any.

    The result is hashable if the parts are, so that prices can be cached.
    """
    if isinstance(event, dpa.ComposedDpEvent):
        if not isinstance(event.events, Sequence):
            raise TypeError(
                "`ComposedDpEvent.events` must be a list or a tuple, since a generator can be read "
                f"only once, got {event.events!r}."
            )
        return attr.evolve(event, events=tuple(change(part) for part in event.events))
    if isinstance(event, WorstOfDpEvent):
        return WorstOfDpEvent(tuple(change(part) for part in event.events))
    if isinstance(getattr(event, "event", None), dpa.DpEvent) and attr.has(type(event)):
        return attr.evolve(event, event=change(event.event))
    return event


def hashable(event: Event) -> Event:
    """Returns the event with composed lists replaced by tuples."""
    return over_parts(event, hashable)


def bounded(event: Event) -> Event:
    """Returns the event with bounds for the parts that only Monte Carlo can price."""
    return event.bound if isinstance(event, ParticipationDpEvent) else over_parts(event, bounded)


def rewrite(event: Event, leaf: Callable[[Event], Event]) -> Event:
    """Returns the event with `leaf` applied to every basic event, from the inside out."""
    wrappers = (
        dp_event.RepeatAndSelectDpEvent,
        dpa.SelfComposedDpEvent,
        dpa.PoissonSampledDpEvent,
        dpa.SampledWithoutReplacementDpEvent,
        CutDpEvent,
        GroupDpEvent,
    )
    if hasattr(event, "event") and not isinstance(event, wrappers):
        raise ValueError(
            f"The event {event} is not accounted for here. Use Gaussian noise under composition, "
            "Poisson sampling or sampling without replacement."
        )
    return leaf(over_parts(event, lambda part: rewrite(part, leaf)))


def without_truncation(event: Event, count: float = 1) -> tuple[Event, float]:
    """Returns the event with unbounded batches, and the p that δ must cover.

    If the event with unbounded batches is (ε, δ)-DP, the event is (ε, δ + p)-DP. Let F be the event
    that in some step the other records fill the batch and the target is drawn. A neighbor without
    the target flips the same coin for it. So F has the same probability, at most p, under both
    neighbors, and

        P[M(D) ∈ S] ≤ p + P[M(D) ∈ S, not F] ≤ p + e^ε P[M(D') ∈ S, not F] + δ.

    For the last inequality, reveal which other records are drawn, and the coins of steps that they
    fill. If F does not happen, these steps look the same under both neighbors, and no other step
    cuts its batch. If the coins of several steps depend on each other, F is the event that the
    others fill any batch.

    For a random number of repetitions, p is multiplied by its mean. Given that F does not happen,
    the number has a law of the same kind with a smaller mean, for which selection costs no more.
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
    """Returns whether a part of the event has an overflow that only δ can cover."""
    found = []

    def look(part: Event) -> Event:
        kinds = RandomAllocationDpEvent, CutDpEvent
        found.append(isinstance(part, kinds) and part.overflow > 0)
        return part

    rewrite(event, look)
    return any(found)


def allocation_as_poisson(event: Event) -> Event:
    """Replaces random allocation by similar Poisson sampling, which is priced fast."""
    if isinstance(event, RandomAllocationDpEvent):
        gaussian = dpa.GaussianDpEvent(event.noise_multiplier)
        step = dpa.PoissonSampledDpEvent(1 / event.period, gaussian)
        return dpa.SelfComposedDpEvent(step, event.steps)
    return event
