"""The privacy cost of tuning: publishing the best of several private runs.

Every trial is a private run with a score. Publishing the best trial reveals more than one run does.
Two procedures have a known price:

* a fixed number of trials, priced as if all of them were published (composition);
* a random number of trials, if *only the best one* is published, and neither the others nor their
  number. The price then grows little with the mean number (docs/developers/selection.md).

In both, the score must be private: computed from public data, or with noise.
"""

import collections
import math
from collections.abc import Sequence
from typing import Any

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event

from dpoptax._pricing.best_trial import NumberOfTrials
from dpoptax._pricing.custom_events import WorstOfDpEvent as _WorstOfDpEvent
from dpoptax._pricing.events import SHAPES
from dpoptax._pricing.events import hashable as _hashable
from dpoptax._pricing.privacy_event import (
    Composable,
    PrivacyEvent,
    joined,
    privacy_event,
)

__all__ = ["SHAPES", "all_of", "best_of_random", "draw_number", "likely_number"]


def __dir__() -> list[str]:
    return __all__


def all_of(trials: Sequence[Composable]) -> PrivacyEvent:
    """Returns the event of publishing all trials, or the best of a fixed number.

    Args:
      trials: the event or guarantee of each trial. Each trial has its own seed and noise key.

    Raises:
      TypeError: a trial is not an event, e.g. an ε.
      ValueError: `trials` is empty, or two trials have the same seed or noise key, or different
        units, users or neighboring relations.

    >>> from dpoptax import accounting
    >>> one = accounting.PrivacyEvent(dpa.GaussianDpEvent(10.0))
    >>> round(accounting.Guarantee(all_of([one] * 16)).epsilon(1e-5), 2)  # as multiplier 10 / √16
    1.55
    """
    given = _given(trials)
    # Equal trials are one event that is repeated, whose privacy loss is computed once.
    counts = collections.Counter(_hashable(each.dp_event) for each in given)
    events = [dpa.SelfComposedDpEvent(event, count) for event, count in counts.items()]
    together = events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)
    return joined(together, given)


def best_of_random(
    candidates: Sequence[Composable], *, mean: float, distribution: str
) -> PrivacyEvent:
    """Returns the event of publishing only the best of a random number of trials.

    Each trial draws a candidate at random, by probabilities that do not depend on the data. The
    number of trials must come from `draw_number` without a bound. It must stay secret, and so must
    the duration of the trials. The "pld" accountant uses the whole privacy curve of a trial. Its ε
    is a few percent above the best known attack. "rdp" is looser.

    Args:
      candidates: the event or planned guarantee of each setting that may be tried, without a seed
        and a noise key: each trial draws its own. The costliest determines the price.
      mean: the mean number of trials, at least 1.
      distribution: "geometric", "poisson" (narrow around its mean, but possibly no trial) or
        "logarithmic" (cheaper than geometric, but often only few trials).

    Raises:
      TypeError: a candidate is not an event, e.g. an ε.
      ValueError: `candidates` is empty, `mean` is below 1, `distribution` is unknown, a candidate
        has a seed or a noise key, or two candidates have different units, users or neighboring
        relations.

    Source: docs/developers/selection.md for "pld"; Papernot and Steinke, "Hyperparameter tuning
    with Rényi differential privacy" (2022), Theorems 2 and 6, as implemented in dp_accounting, for
    "rdp".

    >>> from dpoptax import accounting
    >>> one = accounting.PrivacyEvent(dpa.GaussianDpEvent(10.0))
    >>> event = best_of_random([one], mean=16, distribution="geometric")
    >>> round(accounting.Guarantee(event).epsilon(1e-5), 2)
    0.58
    """
    _check(mean, distribution)
    given = _given(candidates)
    if any(each.seeds or each.keys for each in given):
        raise ValueError(
            "A candidate must not have a sampler seed or a noise key, since it may be tried "
            "several times and each trial needs its own. Pass the guarantee of a "
            "`dpoptax.PrivacyPlan` without `seed`."
        )
    # Without repetitions, since only the costliest candidate counts.
    events = tuple(dict.fromkeys(_hashable(each.dp_event) for each in given))
    worst = events[0] if len(events) == 1 else _WorstOfDpEvent(events)
    shape = SHAPES[distribution]
    selected = dp_event.RepeatAndSelectDpEvent(worst, mean=float(mean), shape=shape)
    return joined(selected, given)


def draw_number(mean: float, distribution: str, seed: int) -> int:
    """Draws the number of trials for `best_of_random`, at least 0 ("poisson") or 1.

    Args:
      mean: at least 1.
      distribution: as for `best_of_random`.
      seed: secret, like the result.

    >>> draws = [draw_number(5.0, "geometric", seed) for seed in range(4000)]
    >>> bool(abs(np.mean(draws) - 5.0) < 0.3), min(draws)
    (True, 1)
    """
    return int(_law(mean, distribution).rvs(random_state=np.random.default_rng(seed)))


def likely_number(mean: float, distribution: str, probability: float = 0.95) -> int:
    """Returns the number of trials that a draw does not exceed with a given probability.

    Args:
      mean: as for `draw_number`.
      distribution: as for `best_of_random`.
      probability: above 0 and below 1.

    >>> likely_number(20.0, "geometric"), likely_number(20.0, "poisson")
    (59, 28)
    """
    return int(_law(mean, distribution).ppf(probability))


def _law(mean: float, distribution: str) -> Any:
    """Returns the distribution of the number of trials."""
    _check(mean, distribution)
    return NumberOfTrials(float(mean), SHAPES[distribution]).law


def _given(events: Sequence[Composable]) -> list[PrivacyEvent]:
    """Returns the events of trials or candidates."""
    if isinstance(events, dpa.DpEvent | PrivacyEvent):
        raise TypeError(
            "The events must be a list, one for each trial or candidate, got one event."
        )
    found = [privacy_event(each) for each in events]  # a generator can be read only once
    if not found:
        raise ValueError("The list of events must not be empty. Pass the event of each trial.")
    return found


def _check(mean: float, distribution: str) -> None:
    if distribution not in SHAPES:
        raise ValueError(f"`distribution` must be one of {sorted(SHAPES)}, got {distribution!r}.")
    if not 1 <= mean < math.inf:
        raise ValueError(f"`mean` must be finite and at least 1, got {mean}.")
