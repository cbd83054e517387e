"""Calibration: the noise, number of steps or batch size whose ε meets a target."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing.checks import (
    Accountant,
    check_accountant,
    check_delta,
    integer,
    number,
    relation_named,
)
from dpoptax._pricing.noise_schedule import phases_of, scaled
from dpoptax._pricing.privacy_event import Composable, other_events
from dpoptax.accounting._parameter_search import Search
from dpoptax.accounting._run_event import (
    Sampling,
    event_of,
    run_event,
    sampler_of,
    sampling_of,
)
from dpoptax.sampling._poisson import PoissonSampler

if TYPE_CHECKING:
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler

_MULTIPLIERS = (0.05, 1e6)
_MAX_STEPS = 10**9


def calibrate(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | Mapping[int, float] | None = None,
    steps: int | None = None,
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    dataset_size: int | None = None,
    schedule: Mapping[int, float] | None = None,
    accountant: Accountant = "pld",
    also: Sequence[Composable] = (),
) -> float:
    """Returns the noise multiplier, number of steps or batch size for a budget.

    The result is the number that is left out. The other arguments are those of `planned_guarantee`;
    `epsilon` is for the sums and the events of `also` together.

    - **Without `noise_multiplier`:** the least one, rounded up to five digits. Its ε is at most the
      target and at least 0.9998 of it, or 0.99 with "monte_carlo". `schedule` maps the first step
      of each phase to a relative multiplier. The result is then the factor s: the noise is
      `gaussian_noise(noise_multiplier={t: s * r for t, r in schedule.items()}, ...)`.
    - **Without `steps`:** the largest number of noisy sums, an `int`. With correlated noise, it is
      at most the number of steps of the strategy.
    - **With `dataset_size` instead of a sampler:** the largest expected batch size of a
      `PoissonSampler` without `max_batch_size`, an `int` of at most `dataset_size`.

    Raises:
      ValueError: an argument is out of range, not exactly one number is left out, or no number
        spends this ε.

    >>> run = {"epsilon": 2.0, "delta": 1e-5}
    >>> round(calibrate(**run, sampling_probability=0.01, steps=1000), 3)
    0.959
    >>> calibrate(**run, sampling_probability=0.01, noise_multiplier=1.1) // 10
    172
    >>> calibrate(**run, dataset_size=50_000, noise_multiplier=1.1, steps=1000)
    644
    """
    left_out = [noise_multiplier is None, steps is None, dataset_size is not None]
    both = schedule is not None and noise_multiplier is not None
    if sum(left_out) != 1 or both or (dataset_size is not None and sampler is not None):
        raise ValueError(
            "Leave out exactly one of `noise_multiplier`, `steps` and `sampler` (with "
            f"`dataset_size` instead), got noise_multiplier={noise_multiplier}, steps={steps}, "
            f"sampler={sampler}, dataset_size={dataset_size}, schedule={schedule}."
        )
    if dataset_size is not None:
        remedy = "count the training records, or users"
        dataset_size = integer("dataset_size", dataset_size, 1, remedy)
        sampler = PoissonSampler(dataset_size, dataset_size)
    if steps is not None:
        steps = integer("steps", steps, 1, "a run without steps has no noise and no batch")
    sampling, others = sampling_of(sampling_probability, sampler), other_events(also)
    relative = 1.0 if schedule is None else schedule
    noise = phases_of(relative if noise_multiplier is None else noise_multiplier)

    def event(x: float) -> dpa.DpEvent:
        """Returns the event with x as the number that is left out."""
        drawn = sampling if dataset_size is None else PoissonSampler(dataset_size, int(x))
        used = noise if noise_multiplier is not None else scaled(noise, x)
        own = event_of(drawn, [(int(x) if steps is None else steps, used)])
        return run_event(own, drawn, others).dp_event

    target = _target(epsilon, delta, accountant, sampling)
    if noise_multiplier is None:
        search = Search(event, *target, *_MULTIPLIERS, rising=False, digits=5)
        return _solution(search, "noise_multiplier", start=1.0)
    if dataset_size is not None:
        search = Search(event, *target, 1, dataset_size, rising=True)
        return int(_solution(search, "batch_size", start=max(1, dataset_size // 100)))
    most = min(_MAX_STEPS, getattr(getattr(sampler, "strategy", None), "steps", _MAX_STEPS))
    return int(_solution(Search(event, *target, 1, most, rising=True), "steps", min(1000, most)))


def _solution(search: Search, name: str, start: float) -> float:
    """Returns the solution, or raises if it is an end of a range that is there for safety."""
    found, spent = search.solve(start)
    text = f"{spent:.3g}, which {name}={found:g} spends at delta={search.delta}"
    if spent > search.epsilon:
        raise ValueError(
            f"`epsilon` must be at least {text}, got {search.epsilon}. Raise `epsilon`, `delta` or "
            "the noise."
        )
    if found == (_MAX_STEPS if name == "steps" else _MULTIPLIERS[0]):
        raise ValueError(
            f"`epsilon` must be below {text}, got {search.epsilon}. Lower `epsilon` or the noise, "
            "or train without noise."
        )
    return found


def _target(
    epsilon: float, delta: float, accountant: str, sampling: Sampling
) -> tuple[float, float, str, dpa.NeighboringRelation]:
    if not 0 < number("epsilon", epsilon) < math.inf:
        raise ValueError(f"`epsilon` must be positive and finite, got {epsilon}.")
    sampler = sampler_of(sampling)
    check_delta(delta, sampler.dataset_size)
    check_accountant(accountant)
    return epsilon, delta, accountant, relation_named(sampler.neighboring_relation)
