"""Privacy losses of events that are priced from the whole curve of another event.

These are the best of a random number of trials, and neighbors that differ in several records.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair

from dpoptax import _pricing
from dpoptax._pricing import best_trial, curves
from dpoptax._pricing.curves import Curve
from dpoptax._pricing.custom_events import WorstOfDpEvent
from dpoptax._pricing.events import SHAPES, GroupDpEvent, unsupported

# The largest ε whose e^ε is computed, and the number of points of a curve.
_MOST, _POINTS = 300.0, 400
_LARGEST_LOG = 700.0
# δ at the end of a curve, to be tried in order: some events have no ε at a small δ. The best trial
# adds δ times its mean number, and group privacy about e^ε for each record.
_LAST_OF_TRIALS, _LAST_OF_RECORDS = (1e-13, 1e-11, 1e-9), (1e-18, 1e-15, 1e-12)

Profile: TypeAlias = tuple[np.ndarray, np.ndarray]
"""ε, (n,), and upper bounds on δ in both directions, (n,)."""

Curves: TypeAlias = Callable[..., Curve]
"""`accountants.curves_of`, with its accountant's relation and interval."""


def pair(
    event: RepeatAndSelectDpEvent | GroupDpEvent, relation: dpa.NeighboringRelation, interval: float
) -> Pair | None:
    """Returns the privacy losses of an event, or None if it is not private."""
    derive = _group if isinstance(event, GroupDpEvent) else _selected
    # The inner curve is rounded on a coarser grid, in the same direction.
    curves_of = _pricing.accountants.curves_of
    found = derive(event, functools.partial(curves_of, relation=relation, interval=10 * interval))
    if found is None:
        return None
    return curves.symmetric(curves.losses(*found, interval), interval)


def _finite(curves_of: Curves, event: Event, last: Sequence[float]) -> Curve:
    """Returns the curve up to the first δ of `last` that has a usable ε."""
    for delta in last:
        found = curves_of(event, least_delta=delta, points=_POINTS)
        if found[0][-1] <= _MOST:
            break
    return found


def _selected(event: RepeatAndSelectDpEvent, curves_of: Curves) -> Profile | None:
    """Returns ε and δ of the best trial.

    A trial that draws one of several candidates at random has at most the largest δ of a candidate
    at each ε.
    """
    if event.shape not in SHAPES.values():
        raise unsupported(event, "unknown shape")
    trial, last = event.event, [delta / event.mean for delta in _LAST_OF_TRIALS]
    candidates = trial.events if isinstance(trial, WorstOfDpEvent) else (trial,)
    found = [_finite(curves_of, each, last) for each in candidates]
    if max(epsilons[-1] for epsilons, _ in found) > _MOST:
        return None
    at = np.unique(np.concatenate([epsilons for epsilons, _ in found]))
    largest = np.max([curves.chords(*curve, at) for curve in found], axis=0)
    number = best_trial.NumberOfTrials(float(event.mean), float(event.shape))
    return best_trial.selected_curve((at, largest), number)


def _group(event: GroupDpEvent, curves_of: Curves) -> Profile | None:
    """Returns ε and δ for neighbors that differ in several records."""
    epsilons, deltas = _finite(curves_of, event.event, _LAST_OF_RECORDS)
    if epsilons[-1] > _MOST:
        return None
    found = [_group_deltas((epsilons, each), event.records) for each in (deltas, deltas[::-1])]
    return event.records * epsilons, np.max(found, axis=0)


def _group_deltas(curve: Curve, records: int) -> np.ndarray:
    """Returns δ at `records` times each ε of the curve.

    A line (s, a) states P(E) ≤ a + s Q(E). Two lines of s and of t records, one after the other,
    are a line (s s', a + s a') of s + t records. The chord of two lines is also one.
    """
    epsilons, (forward, backward) = curve
    logs = np.concatenate([-epsilons[:0:-1], epsilons])
    # 1 − P(E) ≥ e^−ε (1 − Q(E) − δ') for the complement of E
    less = -np.expm1(-epsilons) + np.exp(-epsilons) * backward
    one = np.concatenate([less[:0:-1], forward])

    def lines_of(number: int) -> np.ndarray:
        if number == 1:
            return one
        half = number // 2
        part = half * logs, lines_of(half)
        twice = _lines(part, part, 2 * half * logs)
        return _lines((logs, one), (2 * half * logs, twice), number * logs) if number % 2 else twice

    # Slopes from s = 1 on, which is ε = 0. Smaller slopes served only the doubling.
    return lines_of(records)[len(epsilons) - 1 :]


def _lines(first: Profile, second: Profile, at: np.ndarray) -> np.ndarray:
    """Returns the least a of lines of `first` after chords of `second`, at each log s of `at`."""
    logs, values = second
    # log s′ for which a line of slope s of `first` and one of slope s′ give the slope at `at`.
    places = at - first[0][:, None]
    # Below the least s, the chord to the line (0, 1), which always holds.
    below = 1.0 - np.exp(np.minimum(places - logs[0], 0.0)) * (1.0 - values[0])
    inner = np.where(
        places < logs[0], below, curves.chords(logs, values, np.maximum(places, logs[0]))
    )
    # A steeper line is replaced by P(E) ≤ 1, since its slope would overflow.
    slopes = np.exp(np.minimum(first[0], _LARGEST_LOG))[:, None]
    found = np.where(first[0][:, None] > _LARGEST_LOG, 1.0, first[1][:, None] + slopes * inner)
    return np.minimum(found.min(0), 1.0)
