"""Privacy events of noisy gradient sums, and the parts of a composition."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair
from scipy import stats

RELATIONS = {
    "add-or-remove-one": dpa.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace-one": dpa.NeighboringRelation.REPLACE_ONE,
    "replace-special": dpa.NeighboringRelation.REPLACE_SPECIAL,
}
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Distributions of a random number of trials, and the shape of `RepeatAndSelectDpEvent`."""
# Outside of this range, dp_accounting divides by zero or overflows. Less noise counts as none:
# ε is above 10^5 anyway. More noise counts as the upper limit.
MULTIPLIERS = (1e-3, 1e6)

Parts: TypeAlias = tuple[tuple[Event, int], ...]
"""Events that are composed, each with its number of repetitions."""


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
    noise_multiplier: float, steps: int, sampled: Callable[[Event], Event] = lambda event: event
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
    if sampling_probability == 1:
        return noisy_sum_event(noise_multiplier, steps)
    q = float(sampling_probability)
    return noisy_sum_event(noise_multiplier, steps, lambda one: dpa.PoissonSampledDpEvent(q, one))


def truncated_poisson_event(
    noise_multiplier: float, steps: int, size: int, probability: float, cut_to: int
) -> Event:
    """Returns the event of `steps` noisy sums over Poisson samples cut to `cut_to`."""
    if cut_to >= size:
        return poisson_event(noise_multiplier, probability, steps)

    def sampled(gaussian: Event) -> Event:
        sigma = gaussian.noise_multiplier
        return dpa.TruncatedSubsampledGaussianDpEvent(size, probability, cut_to, sigma)

    return noisy_sum_event(noise_multiplier, steps, sampled)


def full_probability(size: int, probability: float, largest: int) -> float:
    """Computes P(Bin(N, q) ≥ b), the probability that other records fill a batch of b.

    The neighbor may have one more record, so N others are counted instead of N − 1.
    """
    return float(stats.binom.sf(largest - 1, size, probability))


class Uncut(NamedTuple):
    """An event with batches of unbounded size.

    Attributes:
      parts: the releases, over batches of unbounded size.
      overflow: p, an upper bound on the probability of a cut that matters.
      only_by_delta: whether no accountant prices the event with its cuts, so δ must cover them.
    """

    parts: Parts
    overflow: float
    only_by_delta: bool = False


def unsupported(event: Event, message: str) -> dpa.UnsupportedEventError:
    """Returns an error of dp_accounting that says why the event has no price."""
    details = dpa.PrivacyAccountant.CompositionErrorDetails(event, message)
    return dpa.UnsupportedEventError(details)


class CustomDpEvent(dpa.DpEvent):
    """An event that dp_accounting lacks; see `custom_events`."""

    def uncut(self) -> Uncut:
        """Returns the event with unbounded batches, as `without_truncation`."""
        return Uncut(((self, 1),), 0.0)

    def pair(self, relation: dpa.NeighboringRelation, interval: float) -> Pair:
        """Returns the privacy loss of the event.

        Raises:
          dpa.UnsupportedEventError: it is not supported under the relation.
        """
        raise unsupported(self, "unsupported")

    def similar(self) -> Event:
        """Returns an event with about the same price, which is priced fast."""
        return self


@attr.frozen
class GroupDpEvent(CustomDpEvent):
    """The releases of `event` for neighbors that differ in several records, by group privacy.

    Attributes:
      event: The releases, for neighbors that differ in one record.
      records: The number of records.
    """

    event: Event
    records: int


def parts_of(event: Event, count: int = 1) -> Parts:
    """Returns the parts of a composition, which are hashable, so that prices can be cached."""
    if isinstance(event, dpa.SelfComposedDpEvent):
        return parts_of(event.event, count * event.count)
    if isinstance(event, dpa.ComposedDpEvent):
        if not isinstance(event.events, Sequence):
            raise TypeError(
                "`ComposedDpEvent.events` must be a list or a tuple, since a generator can be read "
                f"only once, got {event.events!r}."
            )
        return tuple(part for each in event.events for part in parts_of(each, count))
    names = [field.name for field in getattr(type(event), "__attrs_attrs__", ())]
    inner = {name: _hashable(getattr(event, name)) for name in names}
    return ((attr.evolve(event, **inner) if inner else event, count),)


def composition_of(parts: Parts) -> Event:
    """Returns the event of all parts."""
    events = [e if count == 1 else dpa.SelfComposedDpEvent(e, count) for e, count in parts]
    return events[0] if len(events) == 1 else dpa.ComposedDpEvent(tuple(events))


def hashable(event: Event) -> Event:
    """Returns the event with lists replaced by tuples."""
    return composition_of(parts_of(event))


def _hashable(value: Any) -> Any:
    """Returns a field of an event with lists and arrays replaced by tuples."""
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(map(_hashable, value))
    return hashable(value) if isinstance(value, Event) else value


def without_truncation(parts: Parts) -> Uncut:
    """Returns the parts with unbounded batches, and the p that δ must cover.

    If the event with unbounded batches is (ε, δ)-DP, the event is (ε, δ + p)-DP, with p the
    probability that in some step the other records fill the batch and the target is drawn
    (docs/developers/pricing.md, "Truncated batches"). For a random number of repetitions, p is
    multiplied by its mean: given no such step, the number has a law of the same kind with a smaller
    mean, for which selection costs no more.
    """
    found = [(_uncut(event), count) for event, count in parts]
    plain = tuple((part, count * n) for each, count in found for part, n in each.parts)
    overflow = math.fsum(count * each.overflow for each, count in found)
    return Uncut(plain, overflow, any(each.only_by_delta for each, _ in found))


def _uncut(event: Event) -> Uncut:
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        # p of one step is the probability that the record is drawn and that others fill the batch.
        q, sigma = event.sampling_probability, event.noise_multiplier
        full = full_probability(event.dataset_size, q, event.truncated_batch_size)
        return Uncut(((dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)), 1),), q * full)
    if isinstance(event, CustomDpEvent):
        return event.uncut()
    if isinstance(event, dp_event.RepeatAndSelectDpEvent):
        plain, overflow, only_by_delta = without_truncation(parts_of(event.event))
        selected = attr.evolve(event, event=composition_of(plain))
        return Uncut(((selected, 1),), event.mean * overflow, only_by_delta)
    return Uncut(((event, 1),), 0.0)
