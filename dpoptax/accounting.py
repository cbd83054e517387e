"""Privacy accounting: the epsilon of a run, and the run that fits an epsilon.

The mechanism is a clipped sum over a sampled batch plus Gaussian noise of standard deviation
`noise_multiplier` times the clip bound, `steps` times over; filters and optimizers after it are
post-processing and cost nothing. Multipliers are relative to the clip bound C, whatever the
neighbouring relation: where a record is replaced and the sum moves by 2 C, the doubling is done
here.

Accountants: "pld" (default) composes privacy loss distributions numerically and rounds against
the user; "rdp" composes Renyi divergences: faster, and looser.
"""

import functools
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import dp_accounting as dpa
import numpy as np

from dpoptax import _events
from dpoptax._calibration import Search

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler

Accountant = Literal["pld", "rdp"]

_ADD_OR_REMOVE = "add-or-remove-one"
_MULTIPLIERS = (0.05, 1e6)
_MAX_STEPS = 10**9


def epsilon(
    *,
    noise_multiplier: float,
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
        gives infinity.
      delta: in (0, 1); a value of 1/N or more is warned about where N is known.
      steps: number of noisy releases.
      sampling_probability: of each record in each step, for Poisson sampling under
        add-or-remove-one. Either this or `sampler`.
      sampler: says how batches are drawn, and under which neighbouring relation it protects.
      accountant: "pld" or "rdp".

    Returns:
      An upper bound on epsilon; 0 for no steps.

    Raises:
      ValueError: an argument is out of range, or the accountant cannot handle the sampling.

    Sources: Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian
    mechanism" (2019); Doroshenko et al., "Connect the dots" (2022), both as implemented in
    dp_accounting.

    >>> round(epsilon(noise_multiplier=1.1, sampling_probability=0.01, steps=1000, delta=1e-5), 2)
    1.52
    """
    steps = _integer("steps", steps, 0, "count the noisy releases")
    design = _design(sampling_probability, sampler)
    event = design(_multiplier(noise_multiplier), steps)
    _check_delta(delta, sampler.dataset_size if sampler else None)
    relation = sampler.neighbouring_relation if sampler else _ADD_OR_REMOVE
    return event_epsilon(event, delta, accountant=accountant, neighbouring_relation=relation)


def event_epsilon(
    event: dpa.DpEvent,
    delta: float,
    *,
    accountant: Accountant = "pld",
    neighbouring_relation: str = _ADD_OR_REMOVE,
) -> float:
    """Epsilon of any dp_accounting event at `delta`.

    Differs from dp_accounting's own accountants in three ways. RDP under replace-one doubles
    the sensitivity (its issue 378), so a `GaussianDpEvent`'s multiplier means the same to both
    accountants. PLD accepts sampling without replacement. RDP accepts truncated Poisson
    sampling, by taking p (1 + e^eps) out of delta for a total overflow probability p.

    Args:
      event: what happened; multipliers relative to the clip bound.
      delta: in (0, 1).
      accountant: "pld" or "rdp".
      neighbouring_relation: "add-or-remove-one", "replace-one" or "replace-special" (a record is
        replaced by one that contributes zero).

    Raises:
      ValueError: an argument is out of range, or the accountant cannot handle the event.

    >>> import dp_accounting
    >>> event = dp_accounting.GaussianDpEvent(noise_multiplier=4.0)
    >>> round(event_epsilon(event, 1e-5), 3)
    0.926
    """
    _check_delta(delta)
    _check_accountant(accountant)
    # Runs over many seeds ask for the same event again and again, at up to seconds each.
    priced = _epsilon_of if _is_hashable(event) else _events.epsilon_of
    return priced(event, delta, accountant, _relation(neighbouring_relation))


_epsilon_of = functools.lru_cache(maxsize=4096)(_events.epsilon_of)


def rdp(
    *,
    noise_multiplier: float,
    sampling_probability: float,
    steps: int,
    orders: Sequence[float] | float,
) -> np.ndarray:
    """Renyi divergences of `steps` noisy sums over Poisson samples, one per order.

    steps * D_alpha((1 - q) N(0, s^2) + q N(1, s^2) || N(0, s^2)), add-or-remove-one.

    Args:
      noise_multiplier: s, over the clip bound.
      sampling_probability: q.
      steps: number of noisy releases.
      orders: alpha, each greater than 1.

    Source: Mironov, Talwar, Zhang (2019), section 3.3, as implemented in dp_accounting.

    >>> rdp(noise_multiplier=2.5, sampling_probability=0.01, steps=50, orders=[5])
    array([0.00218076])
    """
    alphas = np.atleast_1d(np.asarray(orders, dtype=float))
    if not np.all(alphas > 1):
        raise ValueError(f"orders={orders} must all be greater than 1; leave out the others")
    steps = _integer("steps", steps, 0, "count the noisy releases")
    event = _design(sampling_probability, None)(_multiplier(noise_multiplier), steps)
    return _events.rdp_curve(event, alphas, _relation(_ADD_OR_REMOVE))


def epsilon_spent(
    opt_state: Any, sampler: "Sampler", delta: float, *, accountant: Accountant = "pld"
) -> float:
    """Epsilon that a run has spent, read from the ledgers in its optimizer state.

    Ledgers of several noise stages are taken to have released noisy sums of the *same* batches,
    as the stages of one optimizer do: releases with multipliers s_1, s_2, ... on one batch are
    one release with (sum s_i^-2)^(-1/2). To price them as if on fresh batches would understate
    epsilon.

    Args:
      opt_state: holds at least one noise stage's state; a restored checkpoint will do.
      sampler: the one that drew the batches; its batch size must be the ledgers'.
      delta: in (0, 1).
      accountant: "pld" or "rdp".

    Raises:
      ValueError: no ledger; a mechanism without a proof; a sampler of another batch size; a
        sampler that has no event, or none with a mechanism's correlated noise; correlated noise
        next to another noise stage.
    """
    from dpoptax._noise import ledgers

    found = ledgers(opt_state)
    if not found:
        raise ValueError(
            "opt_state holds no noise ledger, so nothing is known to be private; pass the state "
            "of a chain that starts with gaussian_noise or clip_and_noise"
        )
    for mechanism in (ledger.mechanism for ledger in found):
        if mechanism.unproven is not None:
            raise ValueError(
                f"opt_state was made by a mechanism without a privacy proof: {mechanism.unproven}. "
                "No epsilon holds for it; use a mechanism that has a proof"
            )
        if mechanism.batch_size != sampler.batch_size:
            raise ValueError(
                f"sampler.batch_size={sampler.batch_size} differs from the noise stage's "
                f"batch_size={mechanism.batch_size}; pass the sampler that drew this run's batches"
            )
    strategies = [ledger.mechanism.strategy for ledger in found]
    if any(strategies) and len(found) > 1:
        raise ValueError(
            f"opt_state holds {len(found)} noise stages, one of them with correlated noise: no "
            "epsilon is known for the two together; remove one"
        )
    sampling = strategies[0].under(sampler) if any(strategies) else sampler
    releases = [(int(ledger.releases), ledger.mechanism.noise_multiplier) for ledger in found]
    events, before = [], 0
    for last in sorted({count for count, _ in releases}):
        active = [multiplier for count, multiplier in releases if count >= last]
        events.append(sampling.dp_event(_joint_multiplier(active), last - before))
        before = last
    _check_delta(delta, sampler.dataset_size)
    return event_epsilon(
        events[0] if len(events) == 1 else dpa.ComposedDpEvent(events),
        delta,
        accountant=accountant,
        neighbouring_relation=sampler.neighbouring_relation,
    )


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> float:
    """The least noise multiplier that keeps `steps` noisy sums within `epsilon`.

    The result is rounded up to five digits, and `epsilon()` of it is at most the target and at
    least 0.9998 of it. Arguments as for `epsilon()`.

    Raises:
      ValueError: an argument is out of range, or no multiplier spends this epsilon.

    >>> sigma = calibrate_noise_multiplier(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, steps=1000
    ... )
    >>> round(sigma, 3)
    0.959
    """
    steps = _integer("steps", steps, 1, "a run without a step needs no noise")
    design = _design(sampling_probability, sampler)
    least, most = _MULTIPLIERS
    multiplier, spent = Search(
        lambda x: design(x, steps),
        *_target(epsilon, delta, accountant, sampler=sampler),
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
    noise_multiplier: float,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> int:
    """The largest number of noisy sums that stays within `epsilon`. Arguments as for `epsilon()`.

    Raises:
      ValueError: an argument is out of range, one step already spends more, or a billion less.

    >>> calibrate_steps(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, noise_multiplier=1.1
    ... ) // 10
    172
    """
    design = _design(sampling_probability, sampler)
    multiplier = _multiplier(noise_multiplier)
    steps, spent = Search(
        lambda x: design(multiplier, int(x)),
        *_target(epsilon, delta, accountant, sampler=sampler),
        lowest=1,
        highest=_MAX_STEPS,
        rising=True,
    ).solve(start=1000)
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

    At most `dataset_size`, which is what a generous budget returns. Arguments as for
    `epsilon()`; the sampling probability is the batch size over `dataset_size`.

    Raises:
      ValueError: an argument is out of range, or a batch size of one already spends more.

    >>> calibrate_batch_size(
    ...     epsilon=2.0, delta=1e-5, noise_multiplier=1.1, dataset_size=50_000, steps=1000
    ... )
    644
    """
    steps = _integer("steps", steps, 1, "a run without a step has no batch")
    dataset_size = _integer("dataset_size", dataset_size, 1, "count the training records")
    multiplier = _multiplier(noise_multiplier)
    size, spent = Search(
        lambda x: _events.poisson_event(multiplier, x / dataset_size, steps),
        *_target(epsilon, delta, accountant, dataset_size=dataset_size),
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


def _design(
    sampling_probability: float | None, sampler: "Sampler | None"
) -> Callable[[float, int], dpa.DpEvent]:
    """(noise_multiplier, steps) -> event, from whichever of the two was given."""
    if (sampling_probability is None) == (sampler is None):
        raise ValueError(
            f"sampling_probability={sampling_probability} and sampler={sampler}: pass exactly one"
        )
    if sampler is not None:
        sampler.dp_event(1.0, 0)  # One that has no event says why here, whatever comes first.
        return sampler.dp_event
    probability = _number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(
            f"sampling_probability={probability} must be in [0, 1]; it is the expected batch size "
            "over the number of records"
        )
    return lambda noise_multiplier, steps: _events.poisson_event(
        noise_multiplier, probability, steps
    )


def _target(
    epsilon: float,
    delta: float,
    accountant: str,
    *,
    sampler: "Sampler | None" = None,
    dataset_size: int | None = None,
) -> tuple[float, float, str, dpa.NeighboringRelation]:
    if not 0 < _number("epsilon", epsilon) < math.inf:
        raise ValueError(
            f"epsilon={epsilon} must be positive and finite; Gaussian noise reaches no other"
        )
    size = sampler.dataset_size if sampler else dataset_size
    _check_delta(delta, size, stacklevel=4)
    _check_accountant(accountant)
    relation = sampler.neighbouring_relation if sampler else _ADD_OR_REMOVE
    return epsilon, delta, accountant, _relation(relation)


def _joint_multiplier(multipliers: Sequence[float]) -> float:
    if len(multipliers) == 1:
        return multipliers[0]
    if 0 in multipliers:
        return 0.0
    precision = math.fsum(m**-2 for m in multipliers)
    return precision**-0.5 if precision else math.inf


def _is_hashable(event: Any) -> bool:
    try:
        hash(event)
    except TypeError:
        return False
    return True


def _relation(name: str) -> dpa.NeighboringRelation:
    if name not in _events.RELATIONS:
        raise ValueError(
            f"neighbouring_relation={name!r} is unknown; use one of {sorted(_events.RELATIONS)}"
        )
    return _events.RELATIONS[name]


def _check_accountant(accountant: str) -> None:
    if accountant not in _events.ACCOUNTANTS:
        raise ValueError(
            f"accountant={accountant!r} is unknown; use one of {list(_events.ACCOUNTANTS)}"
        )


def _check_delta(delta: float, dataset_size: int | None = None, *, stacklevel: int = 3) -> None:
    if not 0 < _number("delta", delta) < 1:
        raise ValueError(
            f"delta={delta} must be in (0, 1); choose it well below one over the number of records"
        )
    if dataset_size is not None and delta >= 1 / dataset_size:
        warnings.warn(
            f"delta={delta} is not below 1/N = {1 / dataset_size:.3g} for dataset_size="
            f"{dataset_size}: publishing a record outright, picked at random, would meet it; "
            "choose a smaller delta",
            UserWarning,
            stacklevel=stacklevel,
        )


def _multiplier(noise_multiplier: float) -> float:
    if not _number("noise_multiplier", noise_multiplier) >= 0:
        raise ValueError(
            f"noise_multiplier={noise_multiplier} must be at least 0; it is the noise's standard "
            "deviation over the clip bound"
        )
    return float(noise_multiplier)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a number; pass a real number")
    return number


def _integer(name: str, value: Any, minimum: int, remedy: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum or isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be an integer of at least {minimum}; {remedy}")
    return number
