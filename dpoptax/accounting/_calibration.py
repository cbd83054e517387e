"""Calibration: the parameter of a run whose epsilon just meets a target."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing import events
from dpoptax._pricing.checks import (
    ADD_OR_REMOVE,
    Accountant,
    check_accountant,
    check_delta,
    checked_multiplier,
    integer,
    number,
    relation_named,
)
from dpoptax._pricing.noise_schedule import checked_phases, scaled
from dpoptax.accounting._design import make_design
from dpoptax.accounting._parameter_search import Search
from dpoptax.matrix._participation import Participation
from dpoptax.sampling import PoissonSampler

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler

_MULTIPLIERS = (0.05, 1e6)
_MAX_STEPS = 10**9


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    schedule: Mapping[int, float] | None = None,
    accountant: Accountant = "pld",
    also: Sequence[dpa.DpEvent] = (),
) -> float:
    """The least noise multiplier that keeps `steps` noisy sums within `epsilon`.

    The result is rounded up to five digits, and `epsilon()` of it is at most the target and at
    least 0.9998 of it, 0.99 by "monte_carlo". Arguments as for `epsilon()`; with `also`, events
    that are released of the same data beside the sums, such as a vocabulary that
    `dpoptax.tables.select_rows` selects, `epsilon` is for all together, as `epsilon_spent` with
    the same `also` prices them. With `schedule`, what the multipliers are to each other by the
    first step of each phase, it is the factor s of those of `dpoptax.gaussian_noise`, `{t: s * r
    for t, r in schedule.items()}`.

    Raises:
      ValueError: an argument is out of range, or no multiplier spends this epsilon.

    >>> sigma = calibrate_noise_multiplier(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, steps=1000
    ... )
    >>> round(sigma, 3)
    0.959
    """
    steps = integer("steps", steps, 1, "a run without a step needs no noise")
    design = make_design(sampling_probability, sampler)
    relative = checked_phases({0: 1.0} if schedule is None else schedule)
    least, most = _MULTIPLIERS
    multiplier, spent = Search(
        lambda x: events.with_others(design.event(scaled(relative, x), steps), also),
        *_target(epsilon, delta, accountant, design.dataset_size, design.relation),
        lowest=least,
        highest=most,
        rising=False,
        digits=5,
    ).solve(start=1.0)
    if spent > epsilon:
        raise ValueError(
            f"epsilon={epsilon} is below what any noise_multiplier up to {most:g} reaches at "
            f"delta={delta}: {accountant} gives {spent:.3g} there; raise epsilon or delta"
        )
    if multiplier == least:
        raise ValueError(
            f"epsilon={epsilon} is above what any noise_multiplier down to {least} spends at "
            f"delta={delta}: {spent:.3g}; lower epsilon or delta, or train without noise"
        )
    return multiplier


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | Mapping[int, float],
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> int:
    """The largest number of noisy sums that stays within `epsilon`. Arguments as for `epsilon()`.

    At most as many as a strategy under the sampler was made for.

    Raises:
      ValueError: an argument is out of range, one step already spends more, or a billion less.

    >>> calibrate_steps(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, noise_multiplier=1.1
    ... ) // 10
    172
    """
    design = make_design(sampling_probability, sampler)
    multiplier = design.multiplier(noise_multiplier)
    most = _MAX_STEPS
    if isinstance(sampler, Participation):
        most = min(_MAX_STEPS, getattr(sampler.strategy, "steps", _MAX_STEPS))
    steps, spent = Search(
        lambda x: design.event(multiplier, int(x)),
        *_target(epsilon, delta, accountant, design.dataset_size, design.relation),
        lowest=1,
        highest=most,
        rising=True,
    ).solve(start=min(1000, most))
    if spent > epsilon:
        raise ValueError(
            f"epsilon={epsilon} is below what a single step spends: {spent:.3g} at "
            f"noise_multiplier={noise_multiplier}; raise epsilon, delta or noise_multiplier"
        )
    if steps == _MAX_STEPS:
        raise ValueError(
            f"epsilon={epsilon} is above what {_MAX_STEPS:g} steps spend: {spent:.3g} at "
            f"noise_multiplier={noise_multiplier}; lower epsilon or noise_multiplier"
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
    """The largest expected batch size that stays within `epsilon`, under Poisson sampling.

    At most `dataset_size`, which is what a generous budget returns. Arguments as for `epsilon()`,
    by which a `PoissonSampler` of that size and no `max_batch_size` is within the budget, too.

    Raises:
      ValueError: an argument is out of range, or a batch size of one already spends more.

    >>> calibrate_batch_size(
    ...     epsilon=2.0, delta=1e-5, noise_multiplier=1.1, dataset_size=50_000, steps=1000
    ... )
    644
    """
    steps = integer("steps", steps, 1, "a run without a step has no batch")
    dataset_size = integer("dataset_size", dataset_size, 1, "count the training records, or users")
    multiplier = checked_multiplier(noise_multiplier)
    size, spent = Search(
        lambda x: PoissonSampler(dataset_size, int(x), seed=0).dp_event(multiplier, steps),
        *_target(epsilon, delta, accountant, dataset_size),
        lowest=1,
        highest=dataset_size,
        rising=True,
    ).solve(start=max(1, dataset_size // 100))
    if spent > epsilon:
        raise ValueError(
            f"epsilon={epsilon} is below what a batch_size of 1 spends: {spent:.3g} at "
            f"noise_multiplier={noise_multiplier}; raise epsilon, delta or noise_multiplier"
        )
    return int(size)


def _target(
    epsilon: float,
    delta: float,
    accountant: str,
    dataset_size: int | None,
    relation: str = ADD_OR_REMOVE,
) -> tuple[float, float, str, dpa.NeighboringRelation]:
    if not 0 < number("epsilon", epsilon) < math.inf:
        raise ValueError(
            f"epsilon={epsilon} must be positive and finite; Gaussian noise reaches no other"
        )
    check_delta(delta, dataset_size, stacklevel=4)
    check_accountant(accountant)
    return epsilon, delta, accountant, relation_named(relation)
