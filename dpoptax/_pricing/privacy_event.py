"""Privacy events of runs, which know the sampler seeds and noise keys that they belong to."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional, Protocol, TypeAlias

import dp_accounting as dpa

if TYPE_CHECKING:
    from dpoptax.sampling._base import Unit

_FINGERPRINT_BYTES = 16
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

    Composing events of two units raises an error. An event without a unit counts for any unit.

    Attributes:
      dp_event: the event of dp_accounting. Noise multipliers are relative to the clipping bound.
      seeds: fingerprints of the seeds of the samplers that drew the batches.
      keys: fingerprints of the noise keys.
      unit: "example" or "user", the unit of the releases; None if the event was priced by hand.
      relations: the neighboring relations of the runs; empty if the event was priced by hand.

    >>> import dp_accounting, dpoptax
    >>> event = PrivacyEvent(dp_accounting.GaussianDpEvent(4.0))
    >>> dpoptax.accounting.Guarantee(event).event.dp_event
    GaussianDpEvent(noise_multiplier=4.0)
    """

    dp_event: dpa.DpEvent
    seeds: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    keys: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)
    unit: Optional["Unit"] = None
    relations: frozenset[str] = dataclasses.field(default=frozenset(), repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.dp_event, dpa.DpEvent):
            raise TypeError(
                f"`dp_event` must be an event of dp_accounting, got {self.dp_event!r}. Pass "
                "releases, such as sampler.dp_event(noise_multiplier, steps); an ε does not "
                "determine them."
            )


class HasEvent(Protocol):
    """Declares the attribute of a guarantee that composition reads."""

    @property
    def event(self) -> PrivacyEvent: ...


Composable: TypeAlias = PrivacyEvent | dpa.DpEvent | HasEvent
"""A `PrivacyEvent`, a `Guarantee`, or an event of dp_accounting, which gets no fingerprints."""


def privacy_event(releases: Composable) -> PrivacyEvent:
    """Returns the event of a guarantee, or wraps an event of dp_accounting."""
    own = getattr(releases, "event", None)
    if isinstance(own, PrivacyEvent):
        return own
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
    """Returns the event composed with others on the same data.

    Raises:
      ValueError: two of the events have the same seed, the same noise key or different units.
    """
    if not others:
        return event
    events = (event, *others)
    return joined(dpa.ComposedDpEvent([each.dp_event for each in events]), events)


def joined(together: dpa.DpEvent, events: Sequence[PrivacyEvent]) -> PrivacyEvent:
    """Returns the event `together` of all `events`, with their seeds, keys and unit.

    Raises:
      ValueError: two of the events have the same seed, the same noise key or different units.
    """
    found = []
    for name, message in (("keys", _SHARED_KEY), ("seeds", _SHARED_SEED)):
        each = [getattr(event, name) for event in events]
        union: frozenset[str] = frozenset().union(*each)
        if len(union) < sum(map(len, each)):
            raise ValueError(message)
        found.append(union)
    keys, seeds = found
    return PrivacyEvent(together, seeds, keys, common_unit(events), relations_of(events))


def relations_of(events: Sequence[PrivacyEvent]) -> frozenset[str]:
    """Returns the neighboring relations of all events."""
    return frozenset().union(*(event.relations for event in events))


def common_unit(events: Sequence[PrivacyEvent]) -> Optional["Unit"]:
    """Returns the unit of all events that have one, or None.

    Raises:
      ValueError: two of the events have different units.
    """
    units = {event.unit for event in events if event.unit is not None}
    if len(units) > 1:
        raise ValueError(_TWO_UNITS)
    return units.pop() if units else None


def seed_fingerprint(seed: int | bytes) -> str:
    """Returns a hash of a sampler's seed that does not reveal it."""
    if isinstance(seed, bytes):
        return _fingerprint("sampler seed of SHAKE-256", seed)
    return _fingerprint("sampler seed of PCG64", seed.to_bytes(seed.bit_length() // 8 + 1))


def key_fingerprint(words: bytes) -> str:
    """Returns a hash of a noise key that does not reveal it."""
    return _fingerprint("noise key", words)


def _fingerprint(use: str, secret: bytes) -> str:
    # The label ends where the zero byte is, so the hashes of different uses are independent.
    text = f"dpoptax fingerprint of a {use}\0".encode()
    return hashlib.shake_256(text + secret).hexdigest(_FINGERPRINT_BYTES)
