"""The sampling of a run, as a function from noise and steps to an event."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Optional

import dp_accounting as dpa

from dpoptax._pricing import events, noise_schedule
from dpoptax._pricing.checks import ADD_OR_REMOVE, checked_multiplier, number
from dpoptax._pricing.noise_schedule import Phases, checked_phases
from dpoptax._pricing.privacy_event import seed_fingerprint

if TYPE_CHECKING:
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling import Sampler
    from dpoptax.sampling._base import Unit


@dataclasses.dataclass(frozen=True)
class Design:
    """Describes the sampling of a run.

    Attributes:
      at: (noise_multiplier, steps) -> the event.
      relation: the name of the neighboring relation.
      dataset_size: N, or None if it is unknown.
      independent_steps: whether the steps can be priced one by one.
      seeds: the fingerprint of the sampler's seed, if it has one.
      unit: "example" or "user", or None if it is unknown.
    """

    at: Callable[[float, int], dpa.DpEvent]
    relation: str = ADD_OR_REMOVE
    dataset_size: int | None = None
    independent_steps: bool = True
    seeds: frozenset[str] = frozenset()
    unit: Optional["Unit"] = None

    def event(self, noise_multiplier: float | Phases, steps: int) -> dpa.DpEvent:
        """Returns the event of `steps` steps with a checked multiplier."""
        if isinstance(noise_multiplier, tuple):
            return noise_schedule.event_of(
                self.at, noise_multiplier, steps, apart=self.independent_steps
            )
        return self.at(noise_multiplier, steps)


def checked_noise(noise_multiplier: float | Mapping[int, float]) -> float | Phases:
    """Returns a noise multiplier, or the phases of a schedule, after checks."""
    if isinstance(noise_multiplier, Mapping):
        return checked_phases(noise_multiplier)
    return checked_multiplier(noise_multiplier)


def check_sampler(sampler: object) -> None:
    """Raises if `sampler` is not a sampler."""
    if isinstance(sampler, type) or not hasattr(sampler, "dp_event"):
        raise TypeError(
            f"`sampler` must be the sampler that draws the batches, got {sampler!r}. Pass one such "
            "as dpoptax.sampling.PoissonSampler(dataset_size=..., batch_size=..., seed=...)."
        )


def seeds_of(sampler: "Sampler | Participation") -> frozenset[str]:
    """Returns the fingerprint of the seed of a sampler; empty without a seed."""
    seed = getattr(getattr(sampler, "sampler", sampler), "seed", None)
    return frozenset() if seed is None else frozenset([seed_fingerprint(seed)])


def make_design(
    sampling_probability: float | None, sampler: "Sampler | Participation | None"
) -> Design:
    """Returns the design for the argument that is not None."""
    if (sampling_probability is None) == (sampler is None):
        raise ValueError(
            "Pass exactly one of `sampling_probability` and `sampler`, got "
            f"sampling_probability={sampling_probability}, sampler={sampler}."
        )
    if sampler is not None:
        check_sampler(sampler)
        sampler.dp_event(1.0, 0)  # raises here, with the reason, if the sampler has no event
        return Design(
            sampler.dp_event,
            sampler.neighboring_relation,
            sampler.dataset_size,
            sampler.independent_steps,
            seeds_of(sampler),
            getattr(getattr(sampler, "sampler", sampler), "unit", None),
        )
    probability = number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(
            f"`sampling_probability` must be in [0, 1], got {probability}. Pass the expected batch "
            "size over the number of records or users."
        )
    return Design(
        lambda noise_multiplier, steps: events.poisson_event(noise_multiplier, probability, steps)
    )
