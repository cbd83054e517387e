"""The privacy cost of tuning: publishing the best of several private runs.

Every trial is a private run with a score. Publishing the best trial reveals more than one run does.
Two procedures have a known price:

* a fixed number of trials, priced as if all of them were published (composition);
* a random number of trials, if *only the best one* is published, and neither the others nor their
  number. The price then grows little with the mean number (Papernot and Steinke, 2022).

In both, the score must be private: computed from public data, or with noise.
"""

import collections
import functools
import math
from collections.abc import Sequence

import dp_accounting as dpa
import numpy as np
from dp_accounting import dp_event
from scipy import optimize, stats

from dpoptax._pricing import events as _events

SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}
"""Distributions of a random number of trials, and the shape of `RepeatAndSelectDpEvent`."""


def all_of(trials: Sequence[dpa.DpEvent]) -> dpa.DpEvent:
    """Returns the event of publishing all trials, or the best of a fixed number.

    Args:
      trials: the event of each trial.

    Raises:
      TypeError: a trial is not an event, e.g. an ε.
      ValueError: `trials` is empty.

    >>> from dpoptax import accounting
    >>> one = dpa.GaussianDpEvent(10.0)
    >>> round(accounting.Guarantee(all_of([one] * 16)).epsilon(1e-5), 2)  # as multiplier 10 / √16
    1.55
    """
    counts = _counted(trials)
    events = [dpa.SelfComposedDpEvent(event, count) for event, count in counts.items()]
    return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)


def best_of_random(
    candidates: Sequence[dpa.DpEvent], *, mean: float, distribution: str
) -> dpa.DpEvent:
    """Returns the event of publishing only the best of a random number of trials.

    Each trial draws a candidate at random, by probabilities that do not depend on the data. Only
    the "rdp" accountant prices this event. The number of trials must come from `draw_number`
    without a bound. It must stay secret, and so must the duration of the trials.

    Args:
      candidates: the event of each setting that may be tried. The costliest determines the price.
      mean: the mean number of trials, at least 1.
      distribution: "geometric", "poisson" (narrow around its mean, but possibly no trial) or
        "logarithmic" (cheaper than geometric, but often only few trials).

    Raises:
      TypeError: a candidate is not an event, e.g. an ε.
      ValueError: `candidates` is empty, `mean` is below 1, or `distribution` is unknown.

    Source: Papernot and Steinke, "Hyperparameter tuning with Rényi differential privacy" (2022),
    Theorems 2 and 6, as implemented in dp_accounting.

    >>> from dpoptax import accounting
    >>> one = dpa.GaussianDpEvent(10.0)
    >>> event = best_of_random([one], mean=16, distribution="geometric")
    >>> round(accounting.Guarantee(event, accountant="rdp").epsilon(1e-5), 2)
    0.9
    """
    _check(mean, distribution)
    events = tuple(_counted(candidates))
    worst = events[0] if len(events) == 1 else _events.WorstOfDpEvent(events)
    return dp_event.RepeatAndSelectDpEvent(worst, mean=float(mean), shape=SHAPES[distribution])


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
    _check(mean, distribution)
    rng = np.random.default_rng(seed)
    if distribution == "poisson":
        return int(rng.poisson(mean))
    if distribution == "geometric" or mean == 1:
        return int(rng.geometric(1 / mean))
    return int(stats.logser.rvs(_logarithmic(float(mean)), random_state=rng))


@functools.cache
def _logarithmic(mean: float) -> float:
    """Returns p of the logarithmic distribution with mean -p/((1 - p) log(1 - p))."""

    def excess(complement: float) -> float:
        return -(1 - complement) / (complement * math.log(complement)) - mean

    return 1 - optimize.brentq(excess, 1e-12, 1 - 1e-9)


def _counted(events: Sequence[dpa.DpEvent]) -> dict[dpa.DpEvent, int]:
    if isinstance(events, dpa.DpEvent):
        raise TypeError(
            "The events must be a list, one for each trial or candidate, got one event."
        )
    events = list(events)  # a generator can be read only once
    if not events:
        raise ValueError("The list of events must not be empty. Pass the event of each trial.")
    for event in events:
        if not isinstance(event, dpa.DpEvent):
            raise TypeError(
                f"A trial must be an event, got {event!r}. Pass its releases, such as "
                "sampler.dp_event(noise_multiplier, steps); an ε does not determine them."
            )
    return collections.Counter(map(_events.hashable, events))


def _check(mean: float, distribution: str) -> None:
    if distribution not in SHAPES:
        raise ValueError(f"`distribution` must be one of {sorted(SHAPES)}, got {distribution!r}.")
    if not 1 <= mean < math.inf:
        raise ValueError(f"`mean` must be finite and at least 1, got {mean}.")
