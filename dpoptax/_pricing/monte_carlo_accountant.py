"""The price of one run by Monte Carlo, for random participation with correlated noise."""

import math
from collections.abc import Callable

import dp_accounting as dpa
from dp_accounting import DpEvent as Event

from dpoptax._pricing import importance_sampling, monte_carlo, random_allocation
from dpoptax._pricing.custom_events import ParticipationDpEvent

# The largest ε of the search. Exponentials of larger values might overflow.
_MOST_DRAWN = 500.0


def epsilon_of(
    event: Event,
    delta: float,
    relation: dpa.NeighboringRelation,
    by_pld: Callable[[Event], float],
    effort: float,
) -> float:
    """Returns an upper confidence bound on ε, at most the "pld" price of the event's bound.

    Args:
      event: the event of one run.
      delta: in (0, 1).
      relation: the neighboring relation.
      by_pld: returns the ε of an event by "pld", at `delta`.
      effort: the share of the usual number of draws.
    """
    if isinstance(event, dpa.NoOpDpEvent):
        return 0.0
    if isinstance(event, dpa.NonPrivateDpEvent):
        return math.inf
    if not isinstance(event, ParticipationDpEvent):
        raise ValueError(
            "`accountant` must be 'pld' or 'rdp', except for one run with a "
            "RandomAllocationSampler or a MinSeparationSampler, got 'monte_carlo' for an event of "
            f"type {type(event).__name__}."
        )
    if relation is dpa.NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            "`neighboring_relation` must be the sampler's for accountant='monte_carlo', got "
            "'replace_one'."
        )
    known = by_pld(event.bound)
    lowest, highest = random_allocation.MULTIPLIERS
    if event.overflow >= delta or not lowest <= event.noise_multiplier <= highest:
        return known
    run = importance_sampling.Run(event.chain, event.column, event.steps, event.noise_multiplier)
    most = min(known, _MOST_DRAWN)
    found = monte_carlo.epsilon_bound(run, delta - event.overflow, most=most, effort=effort)
    return found if found < most else known
