"""The event of several noise stages, of an ensemble, or of noise that changes or is correlated."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing import noise_schedule
from dpoptax._pricing.events import joint_multiplier
from dpoptax._pricing.noise_schedule import Phases
from dpoptax.matrix._participation import Participation

if TYPE_CHECKING:
    from dpoptax._release.ledger import Mechanism
    from dpoptax._release.read_ledger import Ledger, LedgerReadings
    from dpoptax.sampling._base import Sampler


def joint_event(
    readings: "LedgerReadings",
    sampler: "Sampler",
    *,
    same_batches: bool | None,
    noise: float,
    most: int | None,
) -> dpa.DpEvent:
    """Returns the event of all releases; the arguments are those of `spent_event`."""
    if most is not None:
        first = (
            tuple(ledger._replace(releases=min(ledger.releases, most)) for ledger in run)
            for run in readings.runs
        )
        readings = readings._replace(runs=tuple(first))
    if not readings.ensemble:
        return _event(
            readings.runs[0], sampler, same_batches=same_batches is not False, noise=noise
        )
    if same_batches is None:
        raise ValueError(
            "`same_batches` must be True or False for the state of an ensemble, got None. Pass "
            "True if the runs shared the batch of every step, and False if each run drew its own."
        )
    if not same_batches and sampler.seed is not None:
        raise ValueError(
            "`same_batches` must be True for an ensemble whose sampler has a seed: with one seed, "
            "its runs drew equal batches, which costs more than independent ones. If each run drew "
            "with a seed of its own, pass the sampler without one: "
            "dataclasses.replace(sampler, seed=None)."
        )
    if same_batches:
        return _event(readings.ledgers, sampler, same_batches=True, noise=noise)
    return dpa.ComposedDpEvent(
        [_event(run, sampler, same_batches=True, noise=noise) for run in readings.runs]
    )


def _event(
    found: "Sequence[Ledger]", sampler: "Sampler", *, same_batches: bool, noise: float = 1.0
) -> dpa.DpEvent:
    """Returns the event of the releases of several ledgers."""
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
