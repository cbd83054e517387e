"""Privacy accounting: the epsilon of a run, and the run that fits an epsilon.

The mechanism is a clipped sum over a sampled batch plus Gaussian noise of standard deviation
`noise_multiplier` times the clip bound, `steps` times over; filters and optimizers after it are
post-processing and cost nothing. Multipliers are relative to the clip bound C, whatever the
neighbouring relation: where a record is replaced and the sum moves by 2 C, the doubling is done
here.

Accountants: "pld" (default) composes privacy loss distributions numerically and rounds against
the user; "rdp" composes Renyi divergences: faster, and looser.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa
import numpy as np

from dpoptax._privacy import events as _events
from dpoptax._privacy.checks import (
    ADD_OR_REMOVE,
    check_accountant,
    check_delta,
    checked_multiplier,
    integer,
    relation_named,
)
from dpoptax._privacy.checks import (
    Accountant as Accountant,
)
from dpoptax.accounting._calibration import calibrate_batch_size as calibrate_batch_size
from dpoptax.accounting._calibration import calibrate_noise_multiplier as calibrate_noise_multiplier
from dpoptax.accounting._calibration import calibrate_steps as calibrate_steps
from dpoptax.accounting._calibration import make_design

if TYPE_CHECKING:
    from dpoptax._noise.ledger import Ledger
    from dpoptax._trees import PyTree
    from dpoptax.sampling import Sampler


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
    steps = integer("steps", steps, 0, "count the noisy releases")
    design = make_design(sampling_probability, sampler)
    event = design(checked_multiplier(noise_multiplier), steps)
    check_delta(delta, sampler.dataset_size if sampler else None)
    relation = sampler.neighbouring_relation if sampler else ADD_OR_REMOVE
    return event_epsilon(event, delta, accountant=accountant, neighbouring_relation=relation)


def epsilon_curve(
    *,
    noise_multiplier: float,
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
    What a run has spent in the end, and whether it is within a budget, `epsilon` says.

    Args:
      steps: numbers of noisy releases, (counts,), in any order.
      noise_multiplier: as for `epsilon`, and so are all others.
      delta: in (0, 1).
      sampling_probability: this or `sampler`.
      sampler: says how batches are drawn.
      accountant: "pld" or "rdp".

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
    multiplier = checked_multiplier(noise_multiplier)
    check_delta(delta, sampler.dataset_size if sampler else None)
    check_accountant(accountant)
    name = sampler.neighbouring_relation if sampler else ADD_OR_REMOVE

    def exact(count: int) -> float:
        event = design(multiplier, count)
        return event_epsilon(event, delta, accountant=accountant, neighbouring_relation=name)

    def rough(count: int) -> float:
        interval = _CURVE_COARSENESS * _events.DISCRETIZATION
        event, relation = design(multiplier, count), relation_named(name)
        return _events.epsilon_of(event, delta, accountant, relation, interval)

    counts = np.unique(wanted)
    if accountant == "rdp":
        bounds = [exact(int(count)) for count in counts]
    else:
        if len(counts) > _CURVE_COUNTS:
            # Epsilon grows about as the root of the steps: so it rises by even amounts.
            parts = np.arange(1, _CURVE_COUNTS + 1) / _CURVE_COUNTS
            counts = counts[np.unique(np.ceil(parts**2 * len(counts)).astype(int) - 1)]
        bounds = [*(rough(int(count)) for count in counts[:-1]), exact(int(counts[-1]))]
    # A part of the releases reveals no more than all of them, whatever the accountants proved.
    least = np.minimum.accumulate(bounds[::-1])[::-1]
    return np.where(wanted == 0, 0.0, least[np.searchsorted(counts, wanted)])


_CURVE_COUNTS = 10
_CURVE_COARSENESS = 50


def event_epsilon(
    event: dpa.DpEvent,
    delta: float,
    *,
    accountant: Accountant = "pld",
    neighbouring_relation: str = ADD_OR_REMOVE,
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
    check_delta(delta)
    check_accountant(accountant)
    return _events.epsilon_of(event, delta, accountant, relation_named(neighbouring_relation))


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
    steps = integer("steps", steps, 0, "count the noisy releases")
    event = make_design(sampling_probability, None)(checked_multiplier(noise_multiplier), steps)
    return _events.rdp_curve(event, alphas, relation_named(ADD_OR_REMOVE))


def epsilon_spent(
    opt_state: "PyTree", sampler: "Sampler", delta: float, *, accountant: Accountant = "pld"
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
      ValueError: no ledger; one that refused a release, or whose arrays are another mechanism's;
        two noise stages with one key; a mechanism without a proof; a sampler of another batch
        size; a sampler that has no event, or none with a mechanism's correlated noise; correlated
        noise next to another noise stage.
    """
    from dpoptax._noise.ledger import ledgers

    found = ledgers(opt_state)
    if not found:
        raise ValueError(
            "opt_state holds no noise ledger, so nothing is known to be private; pass the state "
            "of a chain that starts with gaussian_noise or clip_and_noise"
        )
    event = _joint_event(found, sampler)
    check_delta(delta, sampler.dataset_size)
    return event_epsilon(
        event, delta, accountant=accountant, neighbouring_relation=sampler.neighbouring_relation
    )


def ensemble_epsilon_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    same_batches: bool,
    accountant: Accountant = "pld",
) -> float:
    """Epsilon of all runs of an ensemble together, which `vmap` made of one step.

    For who gets to see more than one of them: the average of their parameters, the best, or all.
    A single run's epsilon holds for who sees that run and nothing of the others.

    Args:
      opt_state: the states of the runs, stacked: every array has the runs as leading axis.
      sampler: the one that drew the batches.
      delta: in (0, 1).
      same_batches: whether the runs shared their batches, in every step. Then releases with
        multiplier s in n runs are one with s / sqrt(n), as in `epsilon_spent`. Otherwise each run
        drew batches of its own, with a seed of its own, and the runs are composed.
      accountant: "pld" or "rdp".

    Raises:
      ValueError: as `epsilon_spent`; two runs with one key; the state of a single run.
    """
    from dpoptax._noise.ledger import ledgers, runs_of

    runs = runs_of(opt_state)
    ledgers(runs)  # raises where two runs have one key
    found = [ledgers(run) for run in runs]
    if same_batches:
        event = _joint_event([ledger for run in found for ledger in run], sampler)
    else:
        event = dpa.ComposedDpEvent([_joint_event(run, sampler) for run in found])
    check_delta(delta, sampler.dataset_size)
    return event_epsilon(
        event, delta, accountant=accountant, neighbouring_relation=sampler.neighbouring_relation
    )


def _joint_event(found: "Sequence[Ledger]", sampler: "Sampler") -> dpa.DpEvent:
    """What the releases of several ledgers on the same batches reveal."""
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
    strategies = [s for ledger in found if (s := ledger.mechanism.strategy)]
    if strategies and len(found) > 1:
        raise ValueError(
            f"opt_state holds {len(found)} noise stages, one of them with correlated noise: no "
            "epsilon is known for the two together; remove one"
        )
    sampling = strategies[0].under(sampler) if strategies else sampler
    releases = [(int(ledger.releases), ledger.mechanism.noise_multiplier) for ledger in found]
    events, before = [], 0
    for last in sorted({count for count, _ in releases}):
        active = [multiplier for count, multiplier in releases if count >= last]
        events.append(sampling.dp_event(_joint_multiplier(active), last - before))
        before = last
    return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)


def _joint_multiplier(multipliers: Sequence[float]) -> float:
    if len(multipliers) == 1:
        return multipliers[0]
    if 0 in multipliers:
        return 0.0
    precision = math.fsum(m**-2 for m in multipliers)
    return precision**-0.5 if precision else math.inf
