"""Batches of a fixed size, drawn without replacement."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpoptax import _pricing
from dpoptax.sampling._base import Sample, Sampler, checked_step

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class FixedSizeSampler(Sampler):
    """Draws exactly B of the N records in every step, without replacement.

    Privacy: replace-one; N is public. A replaced record changes the clipped sum by up to twice the
    clipping bound, so the same multiplier protects less than with `PoissonSampler`. The accounting
    doubles the sensitivity. ε increases with B, up to that of full batches
    (docs/developers/pricing.md). PLD is tighter than RDP's general bound.

    Sources: Balle, Barthe, Gaboardi, "Privacy amplification by subsampling" (2018), theorem 9, for
    PLD; Wang, Balle, Kasiviswanathan, "Subsampled Rényi differential privacy" (2019), theorem 27,
    for RDP.

    Raises:
      ValueError: an argument is out of range.

    >>> FixedSizeSampler(dataset_size=1000, batch_size=4, seed=0).sample(step=7).mask
    array([ True,  True,  True,  True])
    """

    neighboring_relation: ClassVar[str] = "replace-one"

    def sample(self, step: int) -> Sample:
        """Returns the B records of a step."""
        draws = self._draws(checked_step(step))
        return self._pad(draws.subset(self.dataset_size, self.batch_size), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of `steps` noisy sums over samples without replacement."""
        import dp_accounting as dpa

        if self.batch_size == self.dataset_size:
            return _pricing.events.noisy_sum_event(noise_multiplier, steps)

        def sampled(gaussian: "dpa.DpEvent") -> "dpa.DpEvent":
            sizes = {"source_dataset_size": self.dataset_size, "sample_size": self.batch_size}
            return dpa.SampledWithoutReplacementDpEvent(event=gaussian, **sizes)

        return _pricing.events.noisy_sum_event(noise_multiplier, steps, sampled)
