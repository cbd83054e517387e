"""Events of runs: planned, or read from the ledgers of an optimizer state."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeAlias, cast

import dp_accounting as dpa

from dpoptax._pricing.checks import ADD_OR_REMOVE, checked_multiplier, number
from dpoptax._pricing.events import poisson_event
from dpoptax._pricing.privacy_event import PrivacyEvent, composed
from dpoptax._support.fingerprints import seed_fingerprint

if TYPE_CHECKING:
    from dpoptax._pricing.noise_schedule import Phases
    from dpoptax._release.ledger import Mechanism
    from dpoptax._release.read_ledger import LedgerReadings
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler

Sampling: TypeAlias = "Sampler | Participation | PoissonRate"
"""What prices draws: a sampler, also with a strategy, or only a sampling probability."""


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
        """Returns the sampling as JSON values."""
        return {"sampling_probability": self.sampling_probability}


def checked_noise(noise_multiplier: float | Mapping[int, float]) -> "float | Phases":
    """Returns a noise multiplier, or the phases of a schedule, after checks."""
    if isinstance(noise_multiplier, Mapping):
        from dpoptax._pricing.noise_schedule import checked_phases

        return checked_phases(noise_multiplier)
    return checked_multiplier(noise_multiplier)


def check_sampler(sampler: object) -> None:
    """Raises if `sampler` is not a sampler."""
    if isinstance(sampler, type) or not hasattr(sampler, "dp_event"):
        raise TypeError(
            f"`sampler` must be the sampler that draws the batches, got {sampler!r}. Pass one such "
            "as dpoptax.sampling.PoissonSampler(dataset_size=..., batch_size=..., seed=...)."
        )


def sampling_of(
    sampling_probability: float | None, sampler: "Sampler | Participation | None"
) -> Sampling:
    """Returns the sampling for the argument that is not None."""
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


def event_of(
    sampling: Sampling,
    noise: "float | Phases",
    steps: int,
    others: Sequence[PrivacyEvent] = (),
) -> PrivacyEvent:
    """Returns the event of the first `steps` noisy sums of a run, and of other releases."""
    if isinstance(noise, tuple):
        from dpoptax._pricing import noise_schedule

        apart = sampling.independent_steps
        priced = noise_schedule.event_of(sampling.dp_event, noise, steps, apart=apart)
    else:
        priced = sampling.dp_event(noise, steps)
    return run_event(priced, sampling, others)


def run_event(
    priced: dpa.DpEvent,
    sampling: Sampling,
    others: Sequence[PrivacyEvent],
    keys: frozenset[str] = frozenset(),
) -> PrivacyEvent:
    """Returns the event of a run with the fingerprints of its seed and keys, and of others."""
    seed = sampling.seed
    seeds = frozenset() if seed is None else frozenset([seed_fingerprint(seed)])
    own = PrivacyEvent(
        priced, seeds, keys, sampling.unit, sampling.neighboring_relation, sampling.owners
    )
    return composed(own, others)


def drawing_sampler(sampler: "Sampler | Participation", readings: "LedgerReadings") -> "Sampler":
    """Returns the sampler that drew the batches, without a strategy.

    Raises:
      TypeError: `sampler` is not a sampler.
      ValueError: the strategy of `sampler` is not that of the ledgers.
    """
    check_sampler(sampler)
    strategy = getattr(sampler, "strategy", None)
    if strategy is None:
        return cast("Sampler", sampler)
    strategies = {ledger.mechanism.strategy for ledger in readings.ledgers}
    if strategies != {strategy}:
        raise ValueError(
            f"`sampler` must have the strategy of the noise stage, {[*strategies]}, got "
            f"{strategy}. Pass the sampler that drew the batches; the ledgers hold the "
            "strategy."
        )
    return cast("Participation", sampler).sampler


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
      sampler: from `drawing_sampler`.
      same_batches: as for `guarantee`.
      noise: a factor on all noise multipliers, to price the run with other noise.
      most: if given, only this many first releases of each ledger count.
    """
    ledgers = readings.ledgers
    for ledger in ledgers:
        _check(ledger.mechanism, sampler)
    mechanism = ledgers[0].mechanism
    if readings.ensemble or len(ledgers) > 1 or mechanism.schedule or mechanism.strategy:
        from dpoptax.accounting._joint_releases import joint_event

        return joint_event(readings, sampler, same_batches=same_batches, noise=noise, most=most)
    releases = ledgers[0].releases if most is None else min(ledgers[0].releases, most)
    return sampler.dp_event(noise * mechanism.noise_multiplier, releases)


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
