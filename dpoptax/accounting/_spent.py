"""The event of past releases, read from the ledgers of an optimizer state."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import dp_accounting as dpa

from dpoptax._pricing import noise_schedule
from dpoptax._pricing.events import joint_multiplier
from dpoptax._pricing.noise_schedule import Phases
from dpoptax.accounting._design import check_sampler
from dpoptax.matrix._participation import Participation

if TYPE_CHECKING:
    from dpoptax._release.ledger import Mechanism
    from dpoptax._release.read_ledger import Ledger
    from dpoptax._support.tree import PyTree
    from dpoptax.sampling import Sampler


class LedgerReadings(NamedTuple):
    """Ledgers of an optimizer state.

    Attributes:
      runs: the ledgers of each run, one for each noise stage.
      ensemble: whether the state's arrays have a leading axis of runs.
      keys: fingerprints of the noise keys.
    """

    runs: "tuple[tuple[Ledger, ...], ...]"
    ensemble: bool
    keys: frozenset[str]


def read_ledgers(opt_state: "PyTree") -> LedgerReadings:
    """Returns the ledgers of a run, or of each run of an ensemble.

    Raises:
      ValueError: there is no ledger, or `dpoptax.ledgers` raises it.
    """
    from dpoptax._release.read_ledger import is_ensemble, key_fingerprints, ledgers, runs_of

    if is_ensemble(opt_state):
        runs = runs_of(opt_state)
        ledgers(runs)  # raises if two runs have one key
        each = tuple(ledgers(run) for run in runs)
        return LedgerReadings(each, ensemble=True, keys=key_fingerprints(runs))
    found = ledgers(opt_state)
    if not found:
        raise ValueError(
            "`opt_state` holds no noise ledger. Pass the state of a chain that starts with "
            "gaussian_noise or clip_and_noise. Restore a checkpoint into tx.init(params), which "
            "gives its arrays their meaning."
        )
    return LedgerReadings((found,), ensemble=False, keys=key_fingerprints(opt_state))


def drawing_sampler(sampler: "Sampler | Participation", readings: LedgerReadings) -> "Sampler":
    """Returns the sampler that drew the batches, without a strategy.

    Raises:
      TypeError: `sampler` is not a sampler.
      ValueError: the strategy of `sampler` is not that of the ledgers.
    """
    check_sampler(sampler)
    if not isinstance(sampler, Participation):
        return sampler
    strategies = {ledger.mechanism.strategy for run in readings.runs for ledger in run}
    if strategies != {sampler.strategy}:
        raise ValueError(
            f"`sampler` must have the strategy of the noise stage, {[*strategies]}, got "
            f"{sampler.strategy}. Pass the sampler that drew the batches; the ledgers hold the "
            "strategy."
        )
    return sampler.sampler


def spent_event(
    readings: LedgerReadings,
    sampler: "Sampler | Participation",
    *,
    same_batches: bool | None = None,
    noise: float = 1.0,
    most: int | None = None,
) -> dpa.DpEvent:
    """Returns the event of the releases of a run or of an ensemble.

    Args:
      readings: from `read_ledgers`.
      sampler: as for `guarantee`.
      same_batches: as for `guarantee`.
      noise: a factor on all noise multipliers, to price the run with other noise.
      most: if given, only this many first releases of each ledger count.
    """
    runs, sampler = readings.runs, drawing_sampler(sampler, readings)
    if most is not None:
        runs = tuple(
            tuple(ledger._replace(releases=min(ledger.releases, most)) for ledger in run)
            for run in runs
        )
    if not readings.ensemble:
        return _event(runs[0], sampler, same_batches=same_batches is not False, noise=noise)
    if same_batches is None:
        raise ValueError(
            "`same_batches` must be True or False for the state of an ensemble, got None. Pass "
            "True if the runs shared the batch of every step, and False if each run drew its own."
        )
    if same_batches:
        ledgers = [ledger for run in runs for ledger in run]
        return _event(ledgers, sampler, same_batches=True, noise=noise)
    return dpa.ComposedDpEvent(
        [_event(run, sampler, same_batches=True, noise=noise) for run in runs]
    )


def _event(
    found: "Sequence[Ledger]", sampler: "Sampler", *, same_batches: bool, noise: float = 1.0
) -> dpa.DpEvent:
    """Returns the event of the releases of several ledgers."""
    for mechanism in (ledger.mechanism for ledger in found):
        if mechanism.unproven is not None:
            raise ValueError(
                "`opt_state` was made by a mechanism without a privacy proof, so no ε is stated: "
                f"{mechanism.unproven}."
            )
        if mechanism.batch_size != sampler.batch_size:
            raise ValueError(
                f"`sampler.batch_size` must be the noise stage's, {mechanism.batch_size:g}, got "
                f"{sampler.batch_size}. Pass the sampler that drew this run's batches."
            )
    strategies = [s for ledger in found if (s := ledger.mechanism.strategy)]
    if strategies and len(found) > 1:
        raise ValueError(
            f"`opt_state` holds {len(found)} noise stages, one of them with correlated noise. No ε "
            "is known for them together; remove one."
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
                "`opt_state` holds noise stages with different numbers of releases, and the steps "
                f"of a {type(sampler).__name__} depend on each other, so no ε is known. Use one "
                "noise stage, update all of them in every step, or draw with PoissonSampler."
            )
        # If the stages did take turns, a record may have met only the one with the least noise.
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
    """Returns the multipliers of a stage, multiplied by `noise`."""
    return noise_schedule.scaled(mechanism.schedule or ((0, mechanism.noise_multiplier),), noise)


def _composed(events: list[dpa.DpEvent]) -> dpa.DpEvent:
    return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)
