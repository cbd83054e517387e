"""Minimum separation: each record is drawn at most once in any b steps."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax import _pricing
from dpoptax._pricing.participation_chains import SeparatedChain
from dpoptax.sampling._base import Sample, checked_step
from dpoptax.sampling._chain_sampler import ChainSampler
from dpoptax.sampling._draws import permuted

if TYPE_CHECKING:
    import dp_accounting as dpa

# The range of 2^_LEVELS steps is halved until one step is left.
_LEVELS = 30


@dataclass(frozen=True, kw_only=True)
class MinSeparationSampler(ChainSampler):
    """Draws each record with probability p, unless drawn in the last b − 1 steps.

        p = B/(N − (b − 1) B)

    Records are independent of each other. The run starts in the stationary distribution, so a
    record is in every step with probability B/N. b = 1 is Poisson sampling. If b = N/B, p is 1:
    every record takes part in every b-th step, and its first step is secret and uniform. With a
    larger b, the number of participations of a record varies less, and correlated noise may have
    more bands (`dpoptax.matrix`).

    A draw larger than `max_batch_size` is cut to a uniformly random subset. By default a step is
    cut with probability 10^-18. All accountants include this probability in δ.

    Privacy: "replace-special": a record is replaced by one that contributes zero; N is public. ε is
    for consecutive releases from step 0 on. "monte_carlo" prices the sampling nearly tightly. "pld"
    and "rdp" use an upper bound: Poisson sampling with probability p, or, for correlated noise, one
    Gaussian of the greatest sensitivity.

    Attributes:
      seed: an integer, for NumPy's PCG64.
      separation: b; b · batch_size is at most dataset_size.
      max_batch_size: draws are cut to this size, rounded up to a multiple of `multiple_of`;
        between B and N. None: so large that 1 draw in 10^18 is cut.

    Raises:
      ValueError: an argument is out of range.

    Source: Dong and Ganesh, "Privacy amplification for BandMF via b-min-sep subsampling" (2026).

    >>> sampler = MinSeparationSampler(dataset_size=6, batch_size=2, seed=0, separation=3)
    >>> sampler.participation_probability
    1.0
    >>> sorted(int(i) for s in sampler.samples(0, 3) for i in s.indices[s.mask])
    [0, 1, 2, 3, 4, 5]
    """

    separation: int = 1
    max_batch_size: int | None = None

    _described = ("overflow_probability", "separation", "participation_probability")
    _counts: ClassVar = {"separation": "1 is Poisson sampling"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seed, bytes):
            raise ValueError(
                "`seed` must be an integer: minimum separation is drawn by NumPy's PCG64. Take one "
                "from secrets.randbits(128)."
            )
        if self.separation * self.batch_size > self.dataset_size:
            raise ValueError(
                "`separation` times `batch_size` must be at most `dataset_size`, "
                f"{self.dataset_size}, got {self.separation} times {self.batch_size}. Records that "
                "rest for separation − 1 steps cannot fill the batches."
            )

    @property
    def participation_probability(self) -> float:
        """p, the probability that a record takes part in a step if it may."""
        resting = (self.separation - 1) * self.batch_size
        return self.batch_size / (self.dataset_size - resting)

    @property
    def chain(self) -> SeparatedChain:
        """The law of a record's participations: probability p, then b − 1 steps of rest."""
        return SeparatedChain(self.separation, self.participation_probability)

    def sample(self, step: int) -> Sample:
        """Returns the records of a step, in time proportional to the batch size plus b³.

        A range of 2^30 steps is halved until only the requested step is left. Records that are in
        state a at the start of a range and in state c at its end form a group with a keyed random
        order. A multinomial draw gives the number of members in each state at the middle, and the
        members are assigned to these states in their order. The batch is the groups in state 0 at
        the end of the step. On the way back, places in a group are mapped to places in the groups
        of the wider range, and finally to records.
        """
        step = checked_step(step)
        if step >= 2**_LEVELS:
            raise ValueError(f"`step` must be below {2**_LEVELS}, got {step}.")
        sizes = _sizes(self, 0, step)
        counts = sizes[:, 0]
        first = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        if len(place) > self._largest:
            kept = self._pcg64(0, step, 0).permutation(len(place))[: self._largest]
            first, place = first[kept], place[kept]
        last = np.zeros_like(first)
        for level in range(1, _LEVELS + 1):
            index = step >> level
            lengths, whole = _lengths(self, level, index), _sizes(self, level, index)
            if step >> (level - 1) & 1:  # right half: groups (middle, end), sorted by begin
                middle, parts = first, lengths[:, last, first].T
                which, place = _located(parts, place)
                first = which
            else:
                middle, parts = last, lengths[first, :, last]
                which, place = _located(parts, place)
                last = which
            before = np.cumsum(lengths, axis=2) - lengths
            place = place + before[first, last, middle]
            place = permuted(
                place, whole[first, last], self._pcg64(1, index, level), first * len(whole) + last
            )
        before = (np.cumsum(whole) - whole.ravel()).reshape(whole.shape)
        place = place + before[first, last]
        drawn = permuted(place, self.dataset_size, self._pcg64(2, 0, 0))
        return self._pad(drawn, self._draws(step))

    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        return _pricing.custom_events.separated_event(
            noise_multiplier,
            steps,
            probability=self.participation_probability,
            separation=self.separation,
            overflow=self.full_probability,
        )


def _located(parts: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the part and offset of each place; `parts` are (places, parts) sizes."""
    ends = np.cumsum(parts, axis=1)
    which = (place[:, None] >= ends).sum(axis=1)
    start = np.take_along_axis(ends - parts, which[:, None], axis=1)[:, 0]
    return which, place - start


@functools.lru_cache(maxsize=8)
def _powers(separation: int, probability: float) -> tuple[np.ndarray, ...]:
    """Returns P^(2^level) for all levels, with P the transition matrix of a step.

    The state is the number of steps since the last participation, at most max(b − 1, 1).
    """
    oldest = max(separation - 1, 1)
    law = np.zeros((oldest + 1, oldest + 1))
    for age in range(oldest + 1):
        chance = probability if age >= separation - 1 else 0.0
        law[age, 0] += chance
        law[age, min(age + 1, oldest)] += 1 - chance
    powers = [law]
    for _ in range(_LEVELS):
        powers.append(powers[-1] @ powers[-1])
    return tuple(powers)


@functools.lru_cache(maxsize=4 * _LEVELS)
def _sizes(sampler: MinSeparationSampler, level: int, index: int) -> np.ndarray:
    """Counts records by states at the start and end of 2^level steps, (start, end)."""
    if level < _LEVELS:
        lengths = _lengths(sampler, level + 1, index >> 1)
        return lengths.sum(axis=0).T if index & 1 else lengths.sum(axis=1)
    power = _powers(sampler.separation, sampler.participation_probability)[-1]
    share = sampler.sampling_probability
    # The stationary distribution: B/N for each state except the last.
    start = np.full(len(power), share)
    start[-1] = 1 - share * (len(power) - 1)
    law = (start[:, None] * power).ravel()
    drawn = sampler._pcg64(3, 0, 0).multinomial(sampler.dataset_size, law / law.sum())
    return drawn.reshape(power.shape)


@functools.lru_cache(maxsize=2 * _LEVELS)
def _lengths(sampler: MinSeparationSampler, level: int, index: int) -> np.ndarray:
    """Counts records by states in a range, (begin, end, middle)."""
    half = _powers(sampler.separation, sampler.participation_probability)[level - 1]
    sizes = _sizes(sampler, level, index)
    law = half[:, None, :] * half.T[None, :, :]
    total = law.sum(axis=2, keepdims=True)
    # Impossible pairs of states have no records, so their law is arbitrary.
    law = np.divide(law, total, out=np.full_like(law, 1 / len(half)), where=total > 0)
    return sampler._pcg64(4, index, level).multinomial(sizes, law)
