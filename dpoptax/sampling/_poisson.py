"""Poisson sampling, the default."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpoptax import _pricing
from dpoptax.sampling._base import CutSampler, Sample, checked_step

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class PoissonSampler(CutSampler):
    """Draws every record in every step with probability B/N, independently.

    This is the default sampler. A draw larger than `max_batch_size` is cut to a uniformly random
    subset of that size. `dp_event` includes the cut (arXiv 2508.15089). By default a step is cut
    with probability 10^-12, which does not show in ε. A smaller `max_batch_size` saves padding and
    increases ε.

    Privacy: add-or-remove-one. N, the size of the larger of two neighbors, determines B/N and the
    truncation, and is treated as public.

    Attributes:
      max_batch_size: draws are cut to this size, rounded up to a multiple of `multiple_of`;
        between B and N. None: so large that 1 draw in 10^12 is cut.

    Raises:
      ValueError: an argument is out of range.

    >>> sampler = PoissonSampler(dataset_size=1000, batch_size=10, seed=0, multiple_of=16)
    >>> indices, mask = sampler.sample(step=0)
    >>> indices.shape, mask.shape, sampler.sampling_probability
    ((48,), (48,), 0.01)
    """

    max_batch_size: int | None = None

    neighboring_relation: ClassVar[str] = "add-or-remove-one"

    def sample(self, step: int) -> Sample:
        """Returns the records of a step."""
        draws = self._draws(checked_step(step))
        return self._pad(draws.by_chance(*self._rates, self._largest), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of `steps` noisy sums over (truncated) Poisson samples."""
        batches = *self._rates, self._largest
        return _pricing.events.truncated_poisson_event(noise_multiplier, steps, *batches)
