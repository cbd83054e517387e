"""Batch sampling: which records step t trains on, and the privacy event that this makes.

A sampler is a small frozen value. `sampler.sample(t)` is a function of (seed, t) alone, so that a
restored run continues with the same draws and any step can be replayed, in memory and time of
the order of the batch, however large the dataset. Every sample of a sampler has one shape,
`padded_size`, with a mask of the entries that count, so that a jitted step compiles once.
Records and padding stand in random order: what a record changes in the rounding of a sum is bounded
for others that keep their places, whether it is drawn or not.

Privacy: amplification by sampling holds against those who do not know which records were drawn.
The seed is as secret as the data: never publish it, log it, or reuse it. It decides the generator.

- An integer: NumPy's PCG64, a statistical and not a cryptographic generator: enough against an
  adversary who sees the trained model, not against one who can recover the generator's state.
  NumPy may change its streams between versions (NEP 19); a run is reproducible within one.
- 32 bytes, from `secrets.token_bytes(32)`: SHAKE-256, of the standard library. The draws are as
  good as random to whoever cannot break it, and their law is exact, in whole numbers: none rests on
  floating point. A step takes time and memory of the order of the data set.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax.sampling._allocation import RandomAllocationSampler as RandomAllocationSampler
from dpoptax.sampling._base import CutSampler, checked_step
from dpoptax.sampling._base import Sample as Sample
from dpoptax.sampling._base import Sampler as Sampler
from dpoptax.sampling._separated import MinSeparationSampler as MinSeparationSampler

if TYPE_CHECKING:
    import dp_accounting as dpa

# What prices a sampler is imported where that is asked for: to draw needs neither dp_accounting nor
# SciPy's distributions, which take longer to import than the rest.


@dataclass(frozen=True)
class PoissonSampler(CutSampler):
    """Every record is in every step with probability B/N, independently. The default.

    A draw larger than `max_batch_size` is cut to a uniformly random subset of that many records.
    `dp_event` includes the cut (arXiv 2508.15089). By default it has probability 10^-12 a step and
    does not show in epsilon. A smaller `max_batch_size` saves padding and raises epsilon.

    Privacy: add-or-remove-one; N, the size of the larger of two neighbours, enters through B/N
    and through the truncation, and is treated as public.

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

    neighbouring_relation: ClassVar[str] = "add-or-remove-one"

    def sample(self, step: int) -> Sample:
        """The records of a step."""
        draws = self._draws(checked_step(step))
        rates = self.dataset_size, self.sampling_probability
        return self._pad(draws.by_chance(*rates, self._largest), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """`steps` noisy sums over truncated Poisson samples; plain ones where N records fit."""
        from dpoptax._pricing import events

        return events.truncated_poisson_event(
            noise_multiplier,
            steps,
            size=self.dataset_size,
            probability=self.sampling_probability,
            cut_to=self._largest,
        )

    def describe(self) -> dict[str, object]:
        """As for every sampler, with the probability that a step's draw is cut."""
        return {**super().describe(), "overflow_probability": self.overflow_probability}


@dataclass(frozen=True)
class FixedSizeSampler(Sampler):
    """Every step draws exactly B of the N records, all subsets alike, without replacement.

    Privacy: replace-one, N is public. A replaced record moves the clipped sum by twice the clip
    bound, so the same multiplier buys less than with `PoissonSampler`; the doubling is done in
    the accounting. PLD accounts for this sampling through its dominating pair and is tighter
    than RDP's general bound (Wang, Balle, Kasiviswanathan 2019, Theorem 27).

    Raises:
      ValueError: an argument is out of range.

    >>> FixedSizeSampler(dataset_size=1000, batch_size=4, seed=0).sample(step=7).mask
    array([ True,  True,  True,  True])
    """

    neighbouring_relation: ClassVar[str] = "replace-one"

    def sample(self, step: int) -> Sample:
        """The B records of a step."""
        draws = self._draws(checked_step(step))
        return self._pad(draws.subset(self.dataset_size, self.batch_size), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """`steps` noisy sums over samples without replacement."""
        import dp_accounting as dpa

        from dpoptax._pricing import events

        def sampled(gaussian: "dpa.DpEvent") -> "dpa.DpEvent":
            if self.batch_size == self.dataset_size:
                return gaussian
            return dpa.SampledWithoutReplacementDpEvent(
                source_dataset_size=self.dataset_size, sample_size=self.batch_size, event=gaussian
            )

        return events.noisy_sum_event(noise_multiplier, steps, sampled)


@dataclass(frozen=True)
class ShuffledSampler(Sampler):
    """Epochs over a fresh order of the records; each is seen exactly once an epoch.

    The usual way to train without privacy. It has no privacy event: the amplification of
    shuffled batches is far weaker than that of Poisson sampling, and no accountant here knows
    it. The last step of an epoch holds what is left, N - B (ceil(N/B) - 1) records.

    The order is a keyed permutation, evaluated at the positions of one step only: no array of
    N entries is ever made.

    Raises:
      ValueError: an argument is out of range.

    >>> sampler = ShuffledSampler(dataset_size=5, batch_size=2, seed=0)
    >>> sorted(int(i) for s in sampler.samples(0, 3) for i in s.indices[s.mask])
    [0, 1, 2, 3, 4]
    """

    neighbouring_relation: ClassVar[str] = "none"

    @property
    def steps_per_epoch(self) -> int:
        """⌈N/B⌉, how many batches it takes to see each record once."""
        return -(-self.dataset_size // self.batch_size)

    def sample(self, step: int) -> Sample:
        """The records at the step's place in its epoch's order."""
        step = checked_step(step)
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        positions = np.arange(first, min(first + self.batch_size, self.dataset_size))
        draws = self._draws(epoch)
        return self._pad(draws.permuted(positions, self.dataset_size), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Raises: no epsilon is known to hold."""
        raise ValueError(
            f"sampler={self} has no privacy event: batches of a shuffled epoch are not independent "
            "of each other, and to account for them as Poisson samples understates epsilon; "
            "train with PoissonSampler or FixedSizeSampler"
        )
