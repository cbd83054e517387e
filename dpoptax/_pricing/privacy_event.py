"""Privacy events of runs, which know the sampler seeds and noise keys that they belong to."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import dp_accounting as dpa

from dpoptax._pricing.checks import Unit
from dpoptax._pricing.events import noisy_sum_event
from dpoptax._support.fingerprints import key_fingerprint

T = TypeVar("T")

_SHARED_SEED = (
    "Two of the events must not have the same sampler seed. Equal seeds draw equal batches, and "
    "two releases on one batch cost as much as one with noise σ/√2, more than independent batches. "
    "Start each run by `plan.new_run()`, which draws its own seed. "
    "If both events are of one run, pass only the later one, which includes the earlier one."
)
_SHARED_KEY = (
    "Two of the events must not have the same noise key. Their noise is the same and cancels in "
    "the difference of their releases, so no ε holds for both. Take a new key from "
    "`dpoptax.random_key_from_os()` for each run. If both events are of one run, pass only the "
    "later one, which includes the earlier one."
)
_TWO_UNITS = (
    "All of the events must have the same unit, got 'example' and 'user'. An example-level price "
    "does not cover all records of a user. A user-level price does not cover one changed record of "
    "a user, which replaces that user by another. Draw users in every run, or examples in every "
    "run."
)
_TWO_OWNERS = (
    "All of the events must have the same users, got different owners of the records, or none. A "
    "user of one event may own records of several users of another, so the sum of their prices "
    "covers no user. Make all samplers with `UserTable.sampler` from one list of owners of all "
    "records. A sampler that was made by hand takes `owners=table.owners`."
)
_TWO_RELATIONS = (
    "All of the events must have the same neighboring relation, got {} and {}. A price "
    "under one relation does not cover the neighbors of another. Draw all runs with samplers of "
    "one neighboring relation."
)


@dataclasses.dataclass(frozen=True)
class PrivacyEvent:
    """Describes releases on the data, and the sampler seeds and noise keys that they used.

    `dpoptax.accounting.guarantee` and `PrivacyPlan.guarantee` make it, as the `event` of a
    guarantee. `also` and `dpoptax.accounting.selection` compose it with other events. Two events
    with one seed or one noise key are not independent, so their composition raises an error. An
    event without fingerprints counts as independent of all others: a run that will draw its own
    seed and key, or a mechanism that was priced by hand.

    A fingerprint is a 128-bit hash by SHAKE-256. It does not reveal a random seed or key, but
    anyone can test guesses such as `seed=0`. Do not publish it.

    Composing events of two units, of users of two tables, or of two neighboring relations raises an
    error. An event without a unit counts for any unit and its users. An event without a neighboring
    relation counts for any of them.

    Attributes:
      dp_event: the event of dp_accounting. Noise multipliers are relative to the clipping bound.
      seeds: fingerprints of the seeds of the samplers that drew the batches.
      keys: fingerprints of the noise keys.
      unit: "example" or "user", the unit of the releases; None if the event was priced by hand.
      neighboring_relation: that of the run's sampler; None if the event was priced by hand.
      owners: `UserTable.owners`, a fingerprint of the owner of each record, if users were drawn.

    >>> import dp_accounting, dpoptax
    >>> event = PrivacyEvent(dp_accounting.GaussianDpEvent(4.0))
    >>> dpoptax.accounting.Guarantee(event).event.dp_event
    GaussianDpEvent(noise_multiplier=4.0)
    """

    dp_event: dpa.DpEvent
    seeds: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    keys: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    unit: Unit | None = None
    neighboring_relation: str | None = None
    owners: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.dp_event, dpa.DpEvent):
            raise TypeError(
                f"`dp_event` must be an event of dp_accounting, got {self.dp_event!r}. Pass "
                "releases, such as sampler.dp_event(noise_multiplier, steps); an ε does not "
                "determine them."
            )


def release_event(noise_multiplier: float, key_words: bytes) -> PrivacyEvent:
    """Returns the event of one release of all data, with the noise of a key."""
    event = noisy_sum_event(noise_multiplier, 1)
    return PrivacyEvent(event, keys=frozenset([key_fingerprint(key_words)]))


class HasEvent(Protocol):
    """Declares the attribute of a guarantee that composition reads."""

    @property
    def event(self) -> PrivacyEvent: ...


Composable: TypeAlias = PrivacyEvent | dpa.DpEvent | HasEvent
"""A `PrivacyEvent`, a `Guarantee`, or an event of dp_accounting, which gets no fingerprints."""


def privacy_event(releases: Composable) -> PrivacyEvent:
    """Returns the event of a guarantee, or wraps an event of dp_accounting."""
    # Events of dp_accounting may also have an `event`, which is not a `PrivacyEvent`.
    event = getattr(releases, "event", None)
    if isinstance(event, PrivacyEvent):
        return event
    return releases if isinstance(releases, PrivacyEvent) else PrivacyEvent(releases)


def other_events(also: Sequence[Composable]) -> tuple[PrivacyEvent, ...]:
    """Returns the events of an argument `also`."""
    # A generator can be read only once, and would be empty when the event is built.
    if not isinstance(also, Sequence) or isinstance(also, str | bytes):
        raise TypeError(
            "`also` must be a sequence of guarantees or events, such as [vocabulary.event], got "
            f"{also!r}."
        )
    return tuple(map(privacy_event, also))


def composed(event: PrivacyEvent, others: Sequence[PrivacyEvent]) -> PrivacyEvent:
    """Returns the event composed with others on the same data; raises as `joined`."""
    if not others:
        return event
    events = (event, *others)
    return joined(dpa.ComposedDpEvent([each.dp_event for each in events]), events)


def joined(together: dpa.DpEvent, events: Sequence[PrivacyEvent]) -> PrivacyEvent:
    """Returns the event `together` of all `events`, the only place where events meet.

    Raises:
      ValueError: two of the events have the same seed or noise key, or different units, users or
        neighboring relations.
    """
    return PrivacyEvent(
        together,
        keys=_disjoint([event.keys for event in events], _SHARED_KEY),
        seeds=_disjoint([event.seeds for event in events], _SHARED_SEED),
        unit=_common([e.unit for e in events if e.unit is not None], _TWO_UNITS),
        neighboring_relation=_common(
            [e.neighboring_relation for e in events if e.neighboring_relation is not None],
            _TWO_RELATIONS,
        ),
        # None counts as another table, since nobody knows the owners of such users.
        owners=_common([event.owners for event in events if event.unit == "user"], _TWO_OWNERS),
    )


def _disjoint(fingerprints: Sequence[frozenset[str]], message: str) -> frozenset[str]:
    """Returns the union of the fingerprints, or raises if one is in two of the sets."""
    union: frozenset[str] = frozenset().union(*fingerprints)
    if len(union) < sum(map(len, fingerprints)):
        raise ValueError(message)
    return union


def _common(values: Sequence[T], message: str) -> T | None:
    """Returns the only value, or None of no values, or raises if two of them differ."""
    if len(found := set(values)) > 1:
        raise ValueError(message.format(*sorted(map(str, found))))
    return next(iter(found), None)
