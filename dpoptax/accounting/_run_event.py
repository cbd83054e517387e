"""Events of runs: planned, or read from the ledgers of an optimizer state."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import dp_accounting as dpa

from dpoptax._pricing import noise_schedule
from dpoptax._pricing.checks import ADD_OR_REMOVE
from dpoptax._pricing.events import joint_multiplier, poisson_event
from dpoptax._pricing.privacy_event import PrivacyEvent, composed
from dpoptax._support.argument_checks import number
from dpoptax._support.fingerprints import seed_fingerprint

if TYPE_CHECKING:
    from dpoptax._pricing.noise_schedule import Phases
    from dpoptax._release.ledger import Mechanism
    from dpoptax._release.read_ledger import Ledger, LedgerReadings
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler

Scheme: TypeAlias = "Sampler | Participation | PoissonRate"
"""A sampling scheme: a sampler, also with a strategy, or only a rate. Each has a `dp_event`."""

Stage: TypeAlias = tuple[int, "Phases"]
"""The number of releases of a noise stage, and its multipliers."""


@dataclasses.dataclass(frozen=True)
class PoissonRate:
    """Poisson sampling of a data set of unknown size; it has the attributes of a sampler."""

    sampling_probability: float

    neighboring_relation: ClassVar[str] = ADD_OR_REMOVE
    independent_steps: ClassVar[bool] = True
    dataset_size: ClassVar[None] = None
    seed: ClassVar[None] = None
    unit: ClassVar[None] = None
    owners: ClassVar[None] = None

    def dp_event(self, noise_multiplier: float, steps: int) -> dpa.DpEvent:
        """Returns the event of `steps` noisy sums."""
        return poisson_event(noise_multiplier, self.sampling_probability, steps)

    def describe(self) -> dict[str, object]:
        """Returns the rate as JSON values."""
        return {"sampling_probability": self.sampling_probability}


def check_sampler(sampler: object) -> None:
    """Raises if `sampler` is not a sampler."""
    if isinstance(sampler, type) or not hasattr(sampler, "dp_event"):
        raise TypeError(
            f"`sampler` must be the sampler that draws the batches, got {sampler!r}. Pass one such "
            "as dpoptax.sampling.PoissonSampler(dataset_size=..., batch_size=..., seed=...)."
        )


def scheme_of(
    sampling_probability: float | None, sampler: "Sampler | Participation | None"
) -> Scheme:
    """Returns the sampling scheme for the argument that is not None."""
    if (sampling_probability is None) == (sampler is None):
        raise ValueError(
            "Pass exactly one of `sampling_probability` and `sampler`, got "
            f"sampling_probability={sampling_probability}, sampler={sampler}."
        )
    if sampler is not None:
        check_sampler(sampler)
        sampler.dp_event(1.0, 0)  # raises here, with the reason, if the sampler has no event
        return sampler
    probability = number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(
            f"`sampling_probability` must be in [0, 1], got {probability}. Pass the expected batch "
            "size over the number of records or users."
        )
    return PoissonRate(probability)


def event_of(scheme: Scheme, stages: Sequence[Stage], *, same_batches: bool = True) -> dpa.DpEvent:
    """Returns the event of the first releases of noise stages. A planned run has one stage.

    Stages that share batches are one Gaussian release for each batch, between the steps where one
    ends or changes its noise. If the steps of the sampler depend on each other, it is the event of
    the least multiplier among the steps taken: independent noise added to these releases gives the
    actual ones, also if stages took turns and a record met only the one with the least noise.
    """
    if scheme.independent_steps:
        # Stages that took turns had separate draws, so they are composed like separate runs.
        groups = [stages] if same_batches else [[stage] for stage in stages]
        events = [event for group in groups for event in _events_between_changes(scheme, group)]
        return events[0] if len(events) == 1 else dpa.ComposedDpEvent(events)
    counts = [count for count, _ in stages]
    if same_batches and len(set(counts)) > 1:
        raise ValueError(
            "`opt_state` holds noise stages with different numbers of releases, and the steps "
            f"of a {type(scheme).__name__} depend on each other, so no ε is known. Use one "
            "noise stage, update all of them in every step, or draw with PoissonSampler."
        )
    least = min(noise_schedule.least(phases, count) for count, phases in stages)
    if not same_batches:
        return scheme.dp_event(least, sum(counts))
    # Equal multipliers for all stages, since more noise than the least only reveals less.
    return scheme.dp_event(joint_multiplier([least] * len(stages)), counts[0])


def _events_between_changes(scheme: Scheme, stages: Sequence[Stage]) -> list[dpa.DpEvent]:
    """Returns the events of stages with the same batches, between changes of their noise."""
    ends = {count for count, _ in stages}
    # Between these steps, all multipliers are constant.
    ends |= {first for count, phases in stages for first, _ in phases if 0 < first < count}
    events, before = [], 0
    for last in sorted(ends):
        # Only stages that still release, each with its multiplier from step `before` on.
        active = [noise_schedule.at(phases, before) for count, phases in stages if count >= last]
        events.append(scheme.dp_event(joint_multiplier(active), last - before))
        before = last
    return events


def run_event(
    priced: dpa.DpEvent,
    scheme: Scheme,
    others: Sequence[PrivacyEvent],
    keys: frozenset[str] = frozenset(),
) -> PrivacyEvent:
    """Returns the event of a run with the fingerprints of its seed and keys, and of others."""
    sampler = sampler_of(scheme)
    seeds = frozenset() if sampler.seed is None else frozenset([seed_fingerprint(sampler.seed)])
    about = sampler.unit, sampler.neighboring_relation, sampler.owners
    return composed(PrivacyEvent(priced, seeds, keys, *about), others)


def sampler_of(scheme: Scheme) -> "Sampler | PoissonRate":
    """Returns the sampler without a strategy."""
    if getattr(scheme, "strategy", None) is None:
        return cast("Sampler | PoissonRate", scheme)
    return cast("Participation", scheme).sampler


def matching_sampler(sampler: "Sampler | Participation", readings: "LedgerReadings") -> "Sampler":
    """Returns the sampler that drew the batches, without a strategy.

    Raises:
      TypeError: `sampler` is not a sampler.
      ValueError: the strategy of `sampler` is not that of the ledgers.
    """
    check_sampler(sampler)
    strategy = getattr(sampler, "strategy", None)
    strategies = {ledger.mechanism.strategy for ledger in readings.ledgers}
    if strategy is not None and strategies != {strategy}:
        raise ValueError(
            f"`sampler` must have the strategy of the noise stage, {[*strategies]}, got "
            f"{strategy}. Pass the sampler that drew the batches; the ledgers hold the "
            "strategy."
        )
    return cast("Sampler", sampler_of(sampler))


def spent_event(
    readings: "LedgerReadings",
    sampler: "Sampler",
    *,
    same_batches: bool | None = None,
    noise: float = 1.0,
    most: int | None = None,
) -> dpa.DpEvent:
    """Returns the event of the releases of a run or of an ensemble.

    Args:
      readings: from `read_ledgers`.
      sampler: from `matching_sampler`.
      same_batches: as for `guarantee`.
      noise: a factor on all noise multipliers, to price the run with other noise.
      most: if given, only this many first releases of each stage count.
    """
    for ledger in readings.ledgers:
        _check(ledger.mechanism, sampler)

    def stage_of(ledger: "Ledger") -> Stage:
        phases = noise_schedule.scaled(ledger.mechanism.phases, noise)
        if not sampler.independent_steps:  # the least multiplier of the whole schedule is priced
            phases = ((0, noise_schedule.least(phases)),)
        return ledger.releases if most is None else min(ledger.releases, most), phases

    def event(ledgers: "Sequence[Ledger]", *, same_batches: bool = True) -> dpa.DpEvent:
        stages = list(map(stage_of, ledgers))
        return event_of(_ledger_scheme(ledgers, sampler), stages, same_batches=same_batches)

    if not readings.ensemble:
        return event(readings.ledgers, same_batches=same_batches is not False)
    if same_batches is None:
        raise ValueError(
            "`same_batches` must be True or False for the state of an ensemble, got None. Pass "
            "True if the runs shared the batch of every step, and False if each run drew its own."
        )
    if same_batches:
        return event(readings.ledgers)
    if sampler.seed is not None:
        raise ValueError(
            "`same_batches` must be True for an ensemble whose sampler has a seed: with one seed, "
            "its runs drew equal batches, which costs more than independent ones. If each run drew "
            "with its own seed, pass the sampler without one: "
            "dataclasses.replace(sampler, seed=None)."
        )
    # Each run drew its own batches, so the runs are composed.
    return dpa.ComposedDpEvent([event(run) for run in readings.runs])


def _ledger_scheme(ledgers: "Sequence[Ledger]", sampler: "Sampler") -> Scheme:
    """Returns the sampler with the strategy of the ledgers, if they have one."""
    strategies = [s for ledger in ledgers if (s := ledger.mechanism.strategy)]
    if not strategies:
        return sampler
    if len(ledgers) > 1:
        raise ValueError(
            f"`opt_state` holds {len(ledgers)} noise stages, one of them with correlated noise. No "
            "ε is known for them together; remove one."
        )
    scheme = strategies[0].under(sampler)
    if ledgers[0].mechanism.fixed_point:
        scheme.check_fixed_point()
    return scheme


def _check(mechanism: "Mechanism", sampler: "Sampler") -> None:
    """Raises if no ε is known for a mechanism, or if another sampler drew its batches."""
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
    if mechanism.sampler not in (None, sampler.law):
        raise ValueError(
            f"`sampler` must be that of the noise stage, {mechanism.sampler}, got {sampler.law}. "
            "Each sampler draws other batches at another price. Pass the sampler that drew this "
            "run's batches."
        )
