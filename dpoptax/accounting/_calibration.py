"""Calibration: the noise, number of steps or batch size whose ε meets a target."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing.checks import (
    Accountant,
    check_accountant,
    check_delta,
    checked_multiplier,
    integer,
    number,
    relation_named,
)
from dpoptax._pricing.privacy_event import Composable, other_events
from dpoptax.accounting._parameter_search import Search
from dpoptax.accounting._run_event import Sampling, checked_noise, event_of, sampling_of
from dpoptax.sampling._poisson import PoissonSampler

if TYPE_CHECKING:
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler

_MULTIPLIERS = (0.05, 1e6)
_MAX_STEPS = 10**9


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    schedule: Mapping[int, float] | None = None,
    accountant: Accountant = "pld",
    also: Sequence[Composable] = (),
) -> float:
    """Returns the least noise multiplier that keeps a run within `epsilon`.

    The result is rounded up to five digits. Its ε is at most the target and at least 0.9998 of it,
    or 0.99 with "monte_carlo". The arguments are those of `planned_guarantee`; `epsilon` is for the
    sums and the events of `also` together.

    A `schedule` maps the first step of each phase to a relative multiplier. The result is then the
    factor s: the noise is `gaussian_noise(noise_multiplier={t: s * r for t, r in schedule.items()},
    ...)`.

    Raises:
      ValueError: an argument is out of range, or no multiplier spends this ε.

    >>> sigma = calibrate_noise_multiplier(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, steps=1000
    ... )
    >>> round(sigma, 3)
    0.959
    """
    steps = integer("steps", steps, 1, "a run without steps needs no noise")
    sampling, others = sampling_of(sampling_probability, sampler), other_events(also)
    noise = checked_noise(1.0 if schedule is None else schedule)

    def event(factor: float) -> dpa.DpEvent:
        scaled = tuple((t, factor * r) for t, r in noise) if isinstance(noise, tuple) else factor
        return event_of(sampling, scaled, steps, others).dp_event

    least, most = _MULTIPLIERS
    multiplier, spent = Search(
        event,
        *_target(epsilon, delta, accountant, sampling),
        lowest=least,
        highest=most,
        rising=False,
        digits=5,
    ).solve(start=1.0)
    if spent > epsilon:
        raise ValueError(
            f"`epsilon` must be at least {spent:.3g}, which noise_multiplier={most:g} spends at "
            f"delta={delta}, got {epsilon}. Raise `epsilon` or `delta`."
        )
    if multiplier == least:
        raise ValueError(
            f"`epsilon` must be below {spent:.3g}, which noise_multiplier={least} spends at "
            f"delta={delta}, got {epsilon}. Lower `epsilon` or `delta`, or train without noise."
        )
    return multiplier


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | Mapping[int, float],
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    accountant: Accountant = "pld",
) -> int:
    """Returns the largest number of noisy sums that stays within `epsilon`.

    The arguments are those of `planned_guarantee`. With correlated noise, the result is at most the
    number of steps of the strategy.

    Raises:
      ValueError: an argument is out of range, one step spends more than `epsilon`, or a billion
        steps spend less.

    >>> calibrate_steps(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, noise_multiplier=1.1
    ... ) // 10
    172
    """
    sampling = sampling_of(sampling_probability, sampler)
    multiplier = checked_noise(noise_multiplier)
    strategy = getattr(sampler, "strategy", None)
    most = min(_MAX_STEPS, getattr(strategy, "steps", _MAX_STEPS))
    steps, spent = Search(
        lambda x: event_of(sampling, multiplier, int(x)).dp_event,
        *_target(epsilon, delta, accountant, sampling),
        lowest=1,
        highest=most,
        rising=True,
    ).solve(start=min(1000, most))
    if spent > epsilon:
        raise ValueError(
            f"`epsilon` must be at least {spent:.3g}, which one step spends at noise_multiplier="
            f"{noise_multiplier}, got {epsilon}. Raise `epsilon`, `delta` or `noise_multiplier`."
        )
    if steps == _MAX_STEPS:
        raise ValueError(
            f"`epsilon` must be below {spent:.3g}, which {_MAX_STEPS:g} steps spend at "
            f"noise_multiplier={noise_multiplier}, got {epsilon}. Lower `epsilon` or "
            "`noise_multiplier`."
        )
    return int(steps)


def calibrate_batch_size(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    dataset_size: int,
    steps: int,
    accountant: Accountant = "pld",
) -> int:
    """Returns the largest batch size of Poisson samples that stays within `epsilon`.

    The result is an expected size, at most `dataset_size`. A `PoissonSampler` of this size without
    `max_batch_size` is within the budget. The arguments are those of `planned_guarantee`.

    Raises:
      ValueError: an argument is out of range, or a batch size of one spends more than `epsilon`.

    >>> calibrate_batch_size(
    ...     epsilon=2.0, delta=1e-5, noise_multiplier=1.1, dataset_size=50_000, steps=1000
    ... )
    644
    """
    steps = integer("steps", steps, 1, "a run without steps has no batch")
    dataset_size = integer("dataset_size", dataset_size, 1, "count the training records, or users")
    multiplier = checked_multiplier(noise_multiplier)
    largest = PoissonSampler(dataset_size, dataset_size)
    size, spent = Search(
        lambda x: PoissonSampler(dataset_size, int(x)).dp_event(multiplier, steps),
        *_target(epsilon, delta, accountant, largest),
        lowest=1,
        highest=dataset_size,
        rising=True,
    ).solve(start=max(1, dataset_size // 100))
    if spent > epsilon:
        raise ValueError(
            f"`epsilon` must be at least {spent:.3g}, which a batch size of 1 spends at "
            f"noise_multiplier={noise_multiplier}, got {epsilon}. Raise `epsilon`, `delta` or "
            "`noise_multiplier`."
        )
    return int(size)


def _target(
    epsilon: float, delta: float, accountant: str, sampling: Sampling
) -> tuple[float, float, str, dpa.NeighboringRelation]:
    if not 0 < number("epsilon", epsilon) < math.inf:
        raise ValueError(f"`epsilon` must be positive and finite, got {epsilon}.")
    check_delta(delta, sampling.dataset_size)
    check_accountant(accountant)
    return epsilon, delta, accountant, relation_named(sampling.neighboring_relation)
