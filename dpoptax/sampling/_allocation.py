"""Random allocation: each record takes part in k of T steps, chosen at random."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax import _pricing
from dpoptax.sampling._base import CutSampler, Sample, checked_step
from dpoptax.sampling._draws import RARE_OVERFLOW_PROBABILITY

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class RandomAllocationSampler(CutSampler):
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

    neighboring_relation: ClassVar[str] = "replace-special"
    _overflow = RARE_OVERFLOW_PROBABILITY
    _described = ("overflow_probability", "participations", "period")
    _counts: ClassVar = {**CutSampler._counts, "participations": "1 is once an epoch"}

    @property
    def period(self) -> int:
        """T, the number of steps in which each record takes part exactly k times."""
        return -(-self.participations * self.dataset_size // self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """k / T, the probability that a given record is in a given step."""
        return self.participations / self.period

    @property
    def independent_steps(self) -> bool:
        """False, since the participations of a record depend on each other."""
        return False

    def sample(self, step: int) -> Sample:
        """Returns the records of a step, a function of the seed and the step only."""
        index, place = divmod(checked_step(step), self.period)
        drawn = self._keep(index, lambda: self._draw_period(index))[place]
        draws = self._draws(index, place)
        if len(drawn) > self._largest:
            drawn = drawn[draws.subset(len(drawn), self._largest)]
        return self._pad(drawn, draws)

    def _draw_period(self, index: int) -> list[np.ndarray]:
        """Draws k of T steps for each record, by Floyd's algorithm; returns each step's records.

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
        order = np.argsort(steps.ravel(), kind="stable")
        ends = np.cumsum(np.bincount(steps.ravel(), minlength=self.period))
        return np.split(records[order], ends[:-1])

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of the first `steps` noisy sums, with cuts of batches."""
        return _pricing.custom_events.allocation_event(
            noise_multiplier,
            steps,
            period=self.period,
            participations=self.participations,
            overflow=self.full_probability,
        )
