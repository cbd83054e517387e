"""Epsilon of releases that are described: by their number, or as events of dp_accounting."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa
import numpy as np

from dpoptax._pricing import accountants
from dpoptax._pricing.checks import (
    ADD_OR_REMOVE,
    Accountant,
    check_accountant,
    check_delta,
    integer,
    relation_named,
)
from dpoptax.accounting._design import make_design

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler

# Of `epsilon_curve`: how many counts of steps are priced, and how much coarser than the last.
_CURVE_COUNTS = {"pld": 10, "monte_carlo": 4}
_CURVE_COARSENESS = 50


def epsilon(
    *,
    noise_multiplier: float | Mapping[int, float],
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> float:
    """Epsilon of `steps` noisy clipped sums at `delta`.

    min {eps : P[M(D) in S] <= e^eps P[M(D') in S] + delta for all S and neighbours D, D'}

    Args:
      noise_multiplier: standard deviation of the noise on the *sum*, over the clip bound. 0
        gives infinity. Or a schedule, as for `dpoptax.gaussian_noise`; a sampler whose steps depend
        on each other is priced with the least multiplier among them.
      delta: in (0, 1); a value of 1/N or more is warned about where N is known.
      steps: number of noisy releases.
      sampling_probability: of each record in each step, for Poisson sampling under
        add-or-remove-one. Either this or `sampler`.
      sampler: says how batches are drawn, and under which neighbouring relation it protects.
      accountant: "pld", "rdp" or "monte_carlo".

    Returns:
      An upper bound on epsilon; 0 for no steps.

    Raises:
      ValueError: an argument is out of range, or the accountant cannot handle the sampling.

    Sources: Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian
    mechanism" (2019), with integrals for orders that are not integers; Doroshenko et al., "Connect
    the dots" (2022), as implemented in dp_accounting.

    >>> round(epsilon(noise_multiplier=1.1, sampling_probability=0.01, steps=1000, delta=1e-5), 2)
    1.52
    """
    design = make_design(sampling_probability, sampler)
    event = design.releases(noise_multiplier, steps)
    check_delta(delta, design.dataset_size)
    return event_epsilon(event, delta, accountant=accountant, neighbouring_relation=design.relation)


def epsilon_curve(
    *,
    noise_multiplier: float | Mapping[int, float],
    delta: float,
    steps: Sequence[int],
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> np.ndarray:
    """Bounds on epsilon after each of `steps`, for a run to show as it goes, in milliseconds each.

    e_i >= min {eps : the first steps_i releases are (eps, delta)-DP}, rising with steps_i

    By "rdp" each is that of `epsilon`: divergences are linear in the number of steps. By "pld"
    the greatest number of steps is priced as by `epsilon`, up to 9 others on a grid of the
    privacy loss that is 50 times as coarse, which rounds against the user, and what lies between
    two of them as the greater: what has happened is a part of what will have. That is above
    `epsilon` by about a percent for up to 10 counts, and for more by up to a tenth of the last.
    By "monte_carlo" there are 3 others, with a tenth of the samples.
    What a run has spent in the end, and whether it is within a budget, `epsilon` says.

    Args:
      steps: numbers of noisy releases, (counts,), in any order.
      noise_multiplier: as for `epsilon`, and so are all others.
      delta: in (0, 1).
      sampling_probability: this or `sampler`.
      sampler: says how batches are drawn.
      accountant: "pld", "rdp" or "monte_carlo".

    Returns:
      (counts,), upper bounds on epsilon; 0 where there are no steps.

    Raises:
      ValueError: an argument is out of range, or the accountant cannot handle the sampling.

    >>> run = {"noise_multiplier": 1.1, "sampling_probability": 0.01, "delta": 1e-5}
    >>> epsilon_curve(steps=[0, 500, 1000], **run).round(2)
    array([0.  , 1.1 , 1.52])
    """
    wanted = np.array([integer("steps", s, 0, "count the noisy releases") for s in steps], int)
    if not wanted.size:
        return np.zeros(0)
    design = make_design(sampling_probability, sampler)
    multiplier = design.multiplier(noise_multiplier)
    check_delta(delta, design.dataset_size)
    check_accountant(accountant)
    relation = relation_named(design.relation)

    def exact(count: int) -> float:
        event = design.event(multiplier, count)
        return event_epsilon(
            event, delta, accountant=accountant, neighbouring_relation=design.relation
        )

    def rough(count: int) -> float:
        interval = _CURVE_COARSENESS * accountants.DISCRETIZATION
        return accountants.epsilon_of(
            design.event(multiplier, count), delta, accountant, relation, interval
        )

    counts = np.unique(wanted)
    if accountant == "rdp":
        bounds = [exact(int(count)) for count in counts]
    else:
        most = _CURVE_COUNTS[accountant]
        if len(counts) > most:
            # Epsilon grows about as the root of the steps: so it rises by even amounts.
            parts = np.arange(1, most + 1) / most
            counts = counts[np.unique(np.ceil(parts**2 * len(counts)).astype(int) - 1)]
        bounds = [*(rough(int(count)) for count in counts[:-1]), exact(int(counts[-1]))]
    # A part of the releases reveals no more than all of them, whatever the accountants proved.
    least = np.minimum.accumulate(bounds[::-1])[::-1]
    return np.where(wanted == 0, 0.0, least[np.searchsorted(counts, wanted)])


def event_epsilon(
    event: dpa.DpEvent,
    delta: float,
    *,
    accountant: Accountant = "pld",
    neighbouring_relation: str = ADD_OR_REMOVE,
) -> float:
    """Epsilon of any dp_accounting event at `delta`.

    Differs from dp_accounting's own accountants in four ways.

    * RDP under replace-one doubles the sensitivity (its issue 378), so a `GaussianDpEvent`'s
      multiplier means the same to both accountants.
    * RDP of Poisson sampling is correct at orders that are not integers.
    * RDP accepts truncated Poisson sampling. It takes the probability p that a record takes
      another's place out of delta, or prices each truncated draw, whichever gives less.
    * PLD accepts sampling without replacement. It takes p out of delta where p is at most
      delta/1000, and prices truncated draws otherwise.

    Args:
      event: what happened; multipliers relative to the clip bound.
      delta: in (0, 1).
      accountant: "pld", "rdp" or "monte_carlo".
      neighbouring_relation: "add-or-remove-one", "replace-one" or "replace-special" (a record is
        replaced by one that contributes zero).

    Raises:
      ValueError: an argument is out of range, or the accountant cannot handle the event.

    >>> import dp_accounting
    >>> event = dp_accounting.GaussianDpEvent(noise_multiplier=4.0)
    >>> round(event_epsilon(event, 1e-5), 3)
    0.926
    """
    check_delta(delta)
    check_accountant(accountant)
    return accountants.epsilon_of(event, delta, accountant, relation_named(neighbouring_relation))


def rdp(
    *,
    noise_multiplier: float | Mapping[int, float],
    sampling_probability: float,
    steps: int,
    orders: Sequence[float] | float,
) -> np.ndarray:
    """Computes Renyi divergences of noisy sums over Poisson samples.

    steps * D_alpha((1 - q) N(0, s^2) + q N(1, s^2) || N(0, s^2))

    The releases are (alpha, D)-Renyi DP under add-or-remove-one for each order and its value.

    Args:
      noise_multiplier: s, over the clip bound, or a schedule.
      sampling_probability: q.
      steps: number of noisy releases.
      orders: alpha, each greater than 1.

    Returns:
      (orders,), in nats. Upper bounds that include rounding: within 1e-6 of the divergence for
      orders of at least 1.1 in usual runs. Infinity at order infinity, unless nothing is released.
      With very little noise (s below about 0.03), values between integer orders are interpolated
      from above.

    Raises:
      ValueError: an argument is out of range.

    Source: Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian mechanism"
    (2019): section 3.3 at integers, by dp_accounting, and numerical integration at other orders.

    >>> rdp(noise_multiplier=2.5, sampling_probability=0.01, steps=50, orders=[5])
    array([0.00218076])
    """
    alphas = np.atleast_1d(np.asarray(orders, dtype=float))
    if not np.all(alphas > 1):
        raise ValueError(f"orders={orders} must all be greater than 1; leave out the others")
    event = make_design(sampling_probability, None).releases(noise_multiplier, steps)
    return accountants.rdp_curve(event, alphas, relation_named(ADD_OR_REMOVE))
