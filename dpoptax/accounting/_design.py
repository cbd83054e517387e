"""How the steps of a run are sampled, as far as the accounting asks."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing import events, noise_schedule
from dpoptax._pricing.checks import ADD_OR_REMOVE, checked_multiplier, integer, number
from dpoptax._pricing.noise_schedule import Phases, checked_phases

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Design:
    """How the steps of a run are sampled, as far as the accounting asks.

    Attributes:
      at: (noise_multiplier, steps) -> what happened.
      relation: the name of the neighbouring relation.
      dataset_size: number of records; None where it is not known.
      apart: whether any steps can be priced apart from the others.
    """

    at: Callable[[float, int], dpa.DpEvent]
    relation: str = ADD_OR_REMOVE
    dataset_size: int | None = None
    apart: bool = True

    def event(self, noise_multiplier: float | Phases, steps: int) -> dpa.DpEvent:
        """What happened in `steps` steps of a multiplier that was checked."""
        if isinstance(noise_multiplier, tuple):
            return noise_schedule.event_of(self.at, noise_multiplier, steps, apart=self.apart)
        return self.at(noise_multiplier, steps)

    def releases(self, noise_multiplier: float | Mapping[int, float], steps: int) -> dpa.DpEvent:
        """The event of `steps` noisy sums, or an error that names what is wrong."""
        steps = integer("steps", steps, 0, "count the noisy releases")
        return self.event(self.multiplier(noise_multiplier), steps)

    def multiplier(self, noise_multiplier: float | Mapping[int, float]) -> float | Phases:
        """A noise multiplier or a schedule of them, checked."""
        if isinstance(noise_multiplier, Mapping):
            return checked_phases(noise_multiplier)
        return checked_multiplier(noise_multiplier)


def check_sampler(sampler: object) -> None:
    """Raises where something else stands in the place of a sampler."""
    if isinstance(sampler, type) or not hasattr(sampler, "dp_event"):
        raise TypeError(
            f"sampler={sampler!r}: want the sampler that draws the batches, such as "
            "dpoptax.sampling.PoissonSampler(dataset_size=..., batch_size=..., seed=...)"
        )


def make_design(sampling_probability: float | None, sampler: "Sampler | None") -> Design:
    """The design from whichever of the two was given."""
    if (sampling_probability is None) == (sampler is None):
        raise ValueError(
            f"sampling_probability={sampling_probability} and sampler={sampler}: pass exactly one"
        )
    if sampler is not None:
        check_sampler(sampler)
        sampler.dp_event(1.0, 0)  # One that has no event says why here, whatever comes first.
        return Design(
            sampler.dp_event,
            sampler.neighbouring_relation,
            sampler.dataset_size,
            sampler.independent_steps,
        )
    probability = number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(
            f"sampling_probability={probability} must be in [0, 1]; it is the expected batch size "
            "over the number of records, or of users"
        )
    return Design(
        lambda noise_multiplier, steps: events.poisson_event(noise_multiplier, probability, steps)
    )
