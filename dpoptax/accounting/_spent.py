"""Epsilon of what was released, read from the ledgers of an optimizer state."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing import noise_schedule
from dpoptax._pricing.checks import Accountant, check_delta
from dpoptax._pricing.events import joint_multiplier, with_others
from dpoptax._pricing.noise_schedule import Phases
from dpoptax.accounting._design import check_sampler
from dpoptax.accounting._epsilon import event_epsilon
from dpoptax.matrix._participation import Participation

if TYPE_CHECKING:
    from dpoptax._noise.ledger import Mechanism
    from dpoptax._noise.read_ledger import Ledger
    from dpoptax._tree import PyTree
    from dpoptax.sampling import Sampler


def epsilon_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    same_batches: bool = True,
    accountant: Accountant = "pld",
    also: Sequence[dpa.DpEvent] = (),
) -> float:
    """Epsilon that a run has spent, read from the ledgers in its optimizer state.

    The releases of a ledger are taken to be of a draw each, `sampler.sample(t)` for t = 0, 1, ...:
    k of one draw cost what one with multiplier s / sqrt(k) costs, which is more, and no ledger
    tells it. Releases of several noise stages on the *same* batches, as those of one optimizer are,
    with multipliers s_1, s_2, ..., are one release with (sum s_i^-2)^(-1/2) a batch. To price them
    as if on fresh batches would understate epsilon. Of stages that took turns on draws of their own
    it is the other way round for delta of the order of B/N.

    Args:
      opt_state: holds at least one noise stage's state; a restored checkpoint will do, or an
        `nnx.Optimizer`.
      sampler: the one that drew the batches; its batch size must be the ledgers'.
      delta: in (0, 1).
      same_batches: of several noise stages, whether all were updated on the same draws, step by
        step. Otherwise they took turns: every draw `sampler.sample(t)` was released by one of them.
        Where a sampler's steps depend on each other, as turns of groups do, all are priced with the
        least of the multipliers, as a record may meet one stage alone; so are those of a schedule.
      accountant: "pld", "rdp" or "monte_carlo".
      also: what else was released of the same data, such as a vocabulary that
        `dpoptax.tables.select_rows` selected; composed with the run.

    Raises:
      ValueError: no ledger; one that refused a release, or whose arrays are another mechanism's;
        two noise stages with one key; a mechanism without a proof; a sampler of another batch
        size; a sampler that has no event, or none with a mechanism's correlated noise (in fixed
        point any but a `CyclicPoissonSampler` whose cycle is as long as the noise's bands), or a
        strategy under a sampler in its place; correlated noise next to another noise stage; noise
        stages with different numbers of releases whose same batches were drawn together.
    """
    event = with_others(spent_event(opt_state, sampler, same_batches=same_batches), also)
    return _epsilon(event, sampler, delta, accountant)


def spent_event(
    opt_state: "PyTree", sampler: "Sampler", *, same_batches: bool, noise: float = 1.0
) -> dpa.DpEvent:
    """What the releases of a run reveal, as `epsilon_spent` prices them.

    Args:
      opt_state: as for `epsilon_spent`.
      sampler: as for `epsilon_spent`.
      same_batches: as for `epsilon_spent`.
      noise: a factor on all noise multipliers, for what the run would reveal with other noise.
    """
    from dpoptax._noise.read_ledger import ledgers

    found = ledgers(opt_state)
    if not found:
        raise ValueError(
            "opt_state holds no noise ledger, so nothing is known to be private; pass the state "
            "of a chain that starts with gaussian_noise or clip_and_noise. A checkpoint has one "
            "where it is restored into tx.init(params), which says what its arrays are"
        )
    return _event(found, sampler, same_batches=same_batches, noise=noise)


def ensemble_epsilon_spent(
    opt_state: "PyTree",
    sampler: "Sampler",
    delta: float,
    *,
    same_batches: bool,
    accountant: Accountant = "pld",
    also: Sequence[dpa.DpEvent] = (),
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
        drew batches of its own, with a seed of its own, and the runs are composed. The noise stages
        of one run are taken to have shared theirs.
      accountant: "pld", "rdp" or "monte_carlo".
      also: as for `epsilon_spent`, once for all runs.

    Raises:
      ValueError: as `epsilon_spent`; two runs with one key; the state of a single run.
    """
    from dpoptax._noise.read_ledger import ledgers, runs_of

    runs = runs_of(opt_state)
    ledgers(runs)  # raises where two runs have one key
    found = [ledgers(run) for run in runs]
    if same_batches:
        event = _event([ledger for run in found for ledger in run], sampler, same_batches=True)
    else:
        event = dpa.ComposedDpEvent([_event(run, sampler, same_batches=True) for run in found])
    return _epsilon(with_others(event, also), sampler, delta, accountant)


def _epsilon(event: dpa.DpEvent, sampler: "Sampler", delta: float, accountant: Accountant) -> float:
    check_delta(delta, sampler.dataset_size)
    return event_epsilon(
        event, delta, accountant=accountant, neighbouring_relation=sampler.neighbouring_relation
    )


def _event(
    found: "Sequence[Ledger]", sampler: "Sampler", *, same_batches: bool, noise: float = 1.0
) -> dpa.DpEvent:
    """What the releases of several ledgers reveal."""
    check_sampler(sampler)
    if isinstance(sampler, Participation):
        raise ValueError(
            f"sampler={sampler}: which strategy the noise had, or none, is in the ledgers; pass "
            "the sampler alone, as strategy.under(sampler) has it in its attribute sampler"
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
    strategies = [s for ledger in found if (s := ledger.mechanism.strategy)]
    if strategies and len(found) > 1:
        raise ValueError(
            f"opt_state holds {len(found)} noise stages, one of them with correlated noise: no "
            "epsilon is known for the two together; remove one"
        )
    sampling = strategies[0].under(sampler) if strategies else sampler
    if isinstance(sampling, Participation) and found[0].mechanism.fixed_point:
        sampling.check_fixed_point()
    releases = [(int(ledger.releases), _phases(ledger.mechanism, noise)) for ledger in found]
    least = min(noise_schedule.least(each) for _, each in releases)
    if not same_batches:
        if sampler.independent_steps:
            return _composed(
                [
                    noise_schedule.event_of(sampling.dp_event, each, count, apart=True)
                    for count, each in releases
                ]
            )
        return sampling.dp_event(least, sum(count for count, _ in releases))
    if not sampler.independent_steps:
        if len({count for count, _ in releases}) > 1:
            raise ValueError(
                "opt_state holds noise stages with different numbers of releases, and the steps of "
                f"a {type(sampler).__name__} cannot be priced apart: no epsilon is known; use one "
                "noise stage, update all of them in every step, or draw with PoissonSampler"
            )
        # Should the stages have taken turns in spite of what the caller says, a record may have met
        # one stage alone, the one with the least noise.
        releases = [(count, ((0, least),)) for count, _ in releases]
    ends = {count for count, _ in releases}
    ends |= {first for count, each in releases for first, _ in each if 0 < first < count}
    events, before = [], 0
    for last in sorted(ends):
        active = [noise_schedule.at(each, before) for count, each in releases if count >= last]
        events.append(sampling.dp_event(joint_multiplier(active), last - before))
        before = last
    return _composed(events)


def _phases(mechanism: "Mechanism", noise: float) -> Phases:
    """The multipliers of a stage, each times `noise`."""
    return noise_schedule.scaled(mechanism.schedule or ((0, mechanism.noise_multiplier),), noise)


def _composed(events: list[dpa.DpEvent]) -> dpa.DpEvent:
    return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)
