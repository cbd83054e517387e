"""Noise multipliers that change during a run, by a public schedule."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from dpoptax._support.argument_checks import integer, number

Phases: TypeAlias = tuple[tuple[int, float], ...]
"""First step and noise multiplier of each phase, from step 0 on, in order."""

_LAST = 2**31 - 1  # the largest step that a noise stage can count


# `Mapping` defines the equality, which compares with dicts.
@dataclasses.dataclass(frozen=True, eq=False)
class Schedule(Mapping[int, float]):
    """Holds a copy of a schedule that cannot be changed; equal to a dict of the same items.

    Attributes:
      items_given: pairs of a first step and a multiplier.
    """

    # Not `items`, which is a method of `Mapping`.
    items_given: tuple[tuple[int, float], ...]

    def __getitem__(self, first: int) -> float:
        return dict(self.items_given)[first]

    def __iter__(self) -> Iterator[int]:
        return (first for first, _ in self.items_given)

    def __len__(self) -> int:
        return len(self.items_given)

    def __hash__(self) -> int:
        return hash(frozenset(self.items_given))

    def __repr__(self) -> str:
        return repr(dict(self.items_given))


def checked_phases(schedule: Mapping[int, float]) -> Phases:
    """Returns the phases of a schedule from first steps to multipliers.

    Raises:
      ValueError: no phase starts at step 0, or a multiplier is not positive and finite.
    """
    phases: list[tuple[int, float]] = []
    remedy = "a schedule of noise multipliers is a dict from the first step of each phase"
    for first in sorted(integer("The step of a phase", step, 0, remedy) for step in schedule):
        if first > _LAST:
            raise ValueError(f"The step of a phase must be at most {_LAST}, got {first}.")
        value = number(f"The noise multiplier from step {first} on", schedule[first])
        if not 0 < value < math.inf:
            raise ValueError(
                f"The noise multiplier from step {first} on must be positive and finite, got "
                f"{value}. No ε holds for a run if one step has no noise."
            )
        # A phase that changes nothing is left out, so equal noise has equal phases.
        if not phases or phases[-1][1] != value:
            phases.append((first, value))
    if not phases or phases[0][0] != 0:
        raise ValueError(
            f"`noise_multiplier` must have a phase from step 0 on, got {dict(schedule)}. Pass a "
            "schedule such as {0: 2.0, 100: 1.0}."
        )
    return tuple(phases)


def phases_of(noise_multiplier: float | Mapping[int, float]) -> Phases:
    """Returns the phases of a schedule, or the only one of a number, after checks."""
    if isinstance(noise_multiplier, Mapping):
        return checked_phases(noise_multiplier)
    found = number("noise_multiplier", noise_multiplier)
    if found < 0:
        raise ValueError(
            f"`noise_multiplier` must be at least 0, got {noise_multiplier}. It is the standard "
            "deviation of the noise over the clipping bound."
        )
    return ((0, found),)


def least(phases: Phases, steps: int | None = None) -> float:
    """Returns the least multiplier of all phases, or of those within the first `steps` steps."""
    # The first phase counts even before the first step.
    return min(sigma for first, sigma in phases if steps is None or first < max(1, steps))


def at(phases: Phases, step: int) -> float:
    """Returns the multiplier of a step."""
    return next(multiplier for first, multiplier in reversed(phases) if first <= step)


def scaled(phases: Phases, factor: float) -> Phases:
    """Returns the phases with all multipliers multiplied by a factor."""
    return tuple((first, factor * multiplier) for first, multiplier in phases)
