"""Batch sampling: the records of each step, and the privacy event of drawing them.

A sampler is a small frozen dataclass. `sampler.sample(t)` is a function of the seed and t only, so
a restored run continues with the same draws and any step can be replayed. Drawing takes memory and
time proportional to the batch size, for data sets of any size. All samples have the same shape,
`padded_size`, with a mask of valid entries, so a jitted step compiles once. Records and padding are
in random order. The bound on rounding errors requires that a record does not move the others.

Privacy: amplification by sampling holds if the adversary does not know which records were drawn.
The seed is as secret as the data: never publish it, log it, or reuse it. Its type selects the
generator:

- An integer: NumPy's PCG64, a statistical generator. It suffices against an adversary with access
  to the trained model, but not against the recovery of the generator's state. NumPy may change its
  streams between versions (NEP 19); a run is reproducible within one.
- 32 bytes, from `secrets.token_bytes(32)`: SHAKE-256, of the standard library. The draws are
  indistinguishable from random ones unless SHAKE-256 is broken. They follow the exact distribution,
  computed with integers. A step takes time and memory proportional to the size of the data set.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax.sampling._allocation import RandomAllocationSampler as RandomAllocationSampler
from dpoptax.sampling._base import CutSampler, checked_step
from dpoptax.sampling._base import Sample as Sample
from dpoptax.sampling._base import Sampler as Sampler
from dpoptax.sampling._grouped import GroupedPoissonSampler as GroupedPoissonSampler
from dpoptax.sampling._separated import MinSeparationSampler as MinSeparationSampler

if TYPE_CHECKING:
    import dp_accounting as dpa

# dp_accounting and SciPy's distributions take long to import, and drawing does not need them. They
# are imported when a sampler is priced.


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
        rates = self.dataset_size, self.sampling_probability
        return self._pad(draws.by_chance(*rates, self._largest), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of `steps` noisy sums over (truncated) Poisson samples."""
        from dpoptax._pricing import events

        return events.truncated_poisson_event(
            noise_multiplier,
            steps,
            size=self.dataset_size,
            probability=self.sampling_probability,
            cut_to=self._largest,
        )

    def describe(self) -> dict[str, object]:
        """Returns the sampling as JSON values, with the probability of a cut per step."""
        return {**super().describe(), "overflow_probability": self.overflow_probability}


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

        from dpoptax._pricing import events

        def sampled(gaussian: "dpa.DpEvent") -> "dpa.DpEvent":
            if self.batch_size == self.dataset_size:
                return gaussian
            return dpa.SampledWithoutReplacementDpEvent(
                source_dataset_size=self.dataset_size, sample_size=self.batch_size, event=gaussian
            )

        return events.noisy_sum_event(noise_multiplier, steps, sampled)


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler(Sampler):
    """Draws each record once per epoch, in a new random order.

    This is the usual way to train without privacy. It has no privacy event: the amplification of
    shuffled batches is far weaker than that of Poisson sampling, and no accountant here supports
    it. The last step of an epoch has the remaining N − B (⌈N/B⌉ − 1) records.

    The order is a keyed permutation that is evaluated only at the positions of one step, so no
    array of N entries is created.

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
        positions = np.arange(first, min(first + self.batch_size, self.dataset_size))
        draws = self._draws(epoch)
        return self._pad(draws.permuted(positions, self.dataset_size), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Raises a `ValueError`, since no ε is known for shuffled batches."""
        raise ValueError(
            f"{self} has no privacy event: batches of a shuffled epoch depend on each other, and "
            "accounting for them as Poisson samples understates ε. Train with PoissonSampler or "
            "FixedSizeSampler."
        )
