"""Shuffled epochs, without a privacy event."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpoptax.sampling._base import Sample, Sampler, checked_step

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler(Sampler):
    """Draws each record once per epoch, in a new random order.

    This is the usual way to train without privacy. It has no privacy event: the amplification of
    shuffled batches is far weaker than that of Poisson sampling, and no accountant here supports
    it. The last step of an epoch has the remaining N − B (⌈N/B⌉ − 1) records.

    The sampler keeps the order of an epoch, N numbers.

    Raises:
      ValueError: an argument is out of range.

    >>> sampler = ShuffledSampler(dataset_size=5, batch_size=2, seed=0)
    >>> sorted(int(i) for s in sampler.samples(0, 3) for i in s.indices[s.mask])
    [0, 1, 2, 3, 4]
    """

    neighboring_relation: ClassVar[str] = "none"

    @property
    def steps_per_epoch(self) -> int:
        """⌈N/B⌉, the number of batches in an epoch."""
        return -(-self.dataset_size // self.batch_size)

    def sample(self, step: int) -> Sample:
        """Returns the records at the step's place in its epoch's order."""
        step = checked_step(step)
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        return self._pad(self._order(epoch)[first : first + self.batch_size], self._draws(epoch))

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Raises a `ValueError`, since no ε is known for shuffled batches."""
        raise ValueError(
            f"{self} has no privacy event: batches of a shuffled epoch depend on each other, and "
            "accounting for them as Poisson samples understates ε. Train with PoissonSampler or "
            "FixedSizeSampler."
        )
