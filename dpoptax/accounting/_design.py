"""How the steps of a run are sampled, as far as the accounting asks."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._privacy import events
from dpoptax._privacy.checks import ADD_OR_REMOVE, checked_multiplier, integer, number

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Design:
    """How the steps of a run are sampled, as far as the accounting asks.

    Attributes:
      event: (noise_multiplier, steps) -> what happened.
      relation: the name of the neighbouring relation.
      dataset_size: number of records; None where it is not known.
    """

    event: Callable[[float, int], dpa.DpEvent]
    relation: str = ADD_OR_REMOVE
    dataset_size: int | None = None

    def releases(self, noise_multiplier: float, steps: int) -> dpa.DpEvent:
        """The event of `steps` noisy sums, or an error that names what is wrong."""
        steps = integer("steps", steps, 0, "count the noisy releases")
        return self.event(checked_multiplier(noise_multiplier), steps)


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
        return Design(sampler.dp_event, sampler.neighbouring_relation, sampler.dataset_size)
    probability = number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(
            f"sampling_probability={probability} must be in [0, 1]; it is the expected batch size "
            "over the number of records, or of users"
        )
    return Design(
        lambda noise_multiplier, steps: events.poisson_event(noise_multiplier, probability, steps)
    )
