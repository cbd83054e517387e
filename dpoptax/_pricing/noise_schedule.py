"""Noise multipliers that change in the course of a run, by a public schedule."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from dpoptax._pricing.checks import integer, number

if TYPE_CHECKING:
    import dp_accounting as dpa

Phases: TypeAlias = tuple[tuple[int, float], ...]
"""First step and noise multiplier of each phase, from step 0 on, in order."""


_LAST = 2**31 - 1  # that a noise stage counts to


def checked_phases(schedule: Mapping[int, float]) -> Phases:
    """The phases of a schedule that says from which step on which multiplier holds.

    Raises:
      ValueError: no phase from step 0 on, or a multiplier that is not positive and finite.
    """
    phases: list[tuple[int, float]] = []
    remedy = "a schedule of noise multipliers is a dict from the first step of each phase"
    for first in sorted(integer("the step of a phase", step, 0, remedy) for step in schedule):
        if first > _LAST:
            raise ValueError(f"a phase from step {first} on is behind the last one, {_LAST}")
        value = number(f"the noise multiplier from step {first} on", schedule[first])
        if not 0 < value < math.inf:
            raise ValueError(
                f"the noise multiplier from step {first} on is {value}: want a finite number above "
                "0, as no epsilon holds for a run of which one step has no noise"
            )
        if not phases or phases[-1][1] != value:
            phases.append((first, value))
    if not phases or phases[0][0] != 0:
        raise ValueError(
            f"noise_multiplier={dict(schedule)}: want a phase from step 0 on, such as "
            "{0: 2.0, 100: 1.0}"
        )
    return tuple(phases)


def least(phases: Phases) -> float:
    """The least multiplier of all phases."""
    return min(multiplier for _, multiplier in phases)


def at(phases: Phases, step: int) -> float:
    """The multiplier of a step."""
    return next(multiplier for first, multiplier in reversed(phases) if first <= step)


def scaled(phases: Phases, factor: float) -> Phases:
    """The phases with all multipliers times a factor."""
    return tuple((first, factor * multiplier) for first, multiplier in phases)


def parts(phases: Phases, steps: int) -> list[tuple[float, int]]:
    """The multipliers of the first `steps` steps, and how many steps have each, in order."""
    ends = [first for first, _ in phases[1:]] + [steps]
    found = [
        (multiplier, min(end, steps) - first)
        for (first, multiplier), end in zip(phases, ends, strict=True)
    ]
    return [(multiplier, count) for multiplier, count in found if count > 0]


def event_of(
    event: Callable[[float, int], "dpa.DpEvent"], phases: Phases, steps: int, *, apart: bool
) -> "dpa.DpEvent":
    """The event of the first `steps` steps.

    Where these cannot be priced apart, it is that of the least multiplier among them: its releases
    with more noise added, which nobody's data have a part in, are those that there were.

    Args:
      event: of a multiplier and a number of steps.
      phases: the multipliers.
      steps: how many.
      apart: whether any steps can be priced apart from the others, and prices composed.
    """
    found = parts(phases, steps)
    if len(found) > 1 and apart:
        from dp_accounting import ComposedDpEvent  # which a noise stage can do without

        return ComposedDpEvent([event(*part) for part in found])
    return event(min((multiplier for multiplier, _ in found), default=phases[0][1]), steps)
