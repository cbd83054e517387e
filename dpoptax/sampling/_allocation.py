"""Random allocation: each record takes part in k of T steps, chosen at random."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax import _pricing
from dpoptax._pricing.participation_chains import AllocationChain
from dpoptax.sampling._chain_sampler import ChainSampler, LastStretch, Stretch, batches_of

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class RandomAllocationSampler(ChainSampler):
    """Draws each record in exactly k of every T = ⌈k N/B⌉ steps, chosen uniformly.

    The choice is independent of other records, and is made again for the next T steps. If k = 1, T
    is an epoch of ⌈N/B⌉ steps, and each record is in exactly one of its batches (balls in bins). If
    k is the number of epochs, T is the whole run. Batches have kN/T records on average. This is B
    if B divides kN, and slightly less otherwise; the noisy sum is divided by B in both cases. The
    sampler keeps the batches of T steps, kN numbers.

    A draw larger than `max_batch_size` is cut to a uniformly random subset. By default a step is
    cut with probability 10^-18. `dp_event` includes this probability, and δ covers it.

    Privacy: "replace-special": a record is replaced by one that contributes zero; N is public. ε is
    for consecutive releases from step 0 on. If the last T steps are incomplete, k = 1 is priced for
    the released steps, and k > 1 for all T steps.

    Attributes:
      participations: k.
      max_batch_size: draws are cut to this size, rounded up to a multiple of `multiple_of`;
        between B and N. None: so large that 1 draw in 10^18 is cut.

    Raises:
      ValueError: an argument is out of range.

    Source: Feldman and Shenfeld, "Privacy amplification by random allocation" (2025); balls in
    bins: Chua et al., "Balls-and-bins sampling for DP-SGD" (2024).

    >>> sampler = RandomAllocationSampler(dataset_size=6, batch_size=2, seed=0)
    >>> sampler.period
    3
    >>> sorted(int(i) for s in sampler.samples(0, 3) for i in s.indices[s.mask])
    [0, 1, 2, 3, 4, 5]
    """

    participations: int = 1
    max_batch_size: int | None = None

    _described = ("overflow_probability", "participations", "period")
    _counts: ClassVar = {"participations": "1 is once an epoch"}

    @property
    def period(self) -> int:
        """T, the number of steps in which each record takes part exactly k times."""
        return -(-self.participations * self.dataset_size // self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """k / T, the probability that a given record is in a given step."""
        return self.participations / self.period

    @property
    def chain(self) -> AllocationChain:
        """The law of a record's participations: k of each T steps."""
        return AllocationChain(self.period, self.participations)

    @property
    def _stretch(self) -> int:
        return self.period

    def _draw_stretch(self, index: int, last: LastStretch | None) -> Stretch:
        """Draws k of T steps for each record, by Floyd's algorithm.

        For j = 0, …, k − 1 it draws a number in [0, T − k + j], and takes T − k + j if the number
        was drawn before.
        """
        draws, times = self._draws(index), self.participations
        steps = np.zeros((times, self.dataset_size), np.int64)
        for j in range(times):
            most = self.period - times + j
            found = draws.below(np.full(self.dataset_size, most + 1))
            steps[j] = np.where(np.any(steps[:j] == found, axis=0), most, found)
        records = np.tile(np.arange(self.dataset_size), times)
        return Stretch(batches_of(steps.ravel(), records, self.period))

    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        return _pricing.custom_events.allocation_event(
            noise_multiplier,
            steps,
            period=self.period,
            participations=self.participations,
            overflow=self.full_probability,
        )
