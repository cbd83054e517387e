"""Minimum separation: each record by chance, but never twice within b steps."""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpoptax._pricing.checks import integer
from dpoptax._pricing.participation_chains import SeparatedChain
from dpoptax.sampling._base import ChainSampler, Sample, checked_step
from dpoptax.sampling._draws import permuted_within

if TYPE_CHECKING:
    import dp_accounting as dpa

# Steps are found by halving this many.
_LEVELS = 30


@dataclass(frozen=True)
class MinSeparationSampler(ChainSampler):
    """Draws each record with probability p, unless it was drawn in the last b − 1 steps.

    Independently of all other records, and from the first step on as if the run had gone on for
    ever: in every step a record is with probability B/N, for which p = B/(N − (b − 1) B). b = 1 is
    Poisson sampling. With b = N/B, p is 1: every record takes part in every b-th step, from one
    that is secret and uniform on. The larger b, the closer is a record's number of participations
    to its mean, and the more bands correlated noise may have (`dpoptax.matrix`).

    A draw larger than `max_batch_size` is cut to a uniformly random subset. By default this happens
    with probability 10^-18 a step; it is taken out of δ, by every accountant.

    Privacy: "replace-special", a record is replaced by one that contributes zero; N is public.
    ε is that of releases from step 0 on, in order. "monte_carlo" prices it nearly as it is; "pld"
    and "rdp" as Poisson sampling with probability p, which it is at most, whatever came before,
    and under noise that is correlated over steps as a Gaussian of the greatest sensitivity.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        separation = integer("separation", self.separation, 1, "1 is Poisson sampling")
        object.__setattr__(self, "separation", separation)
        if isinstance(self.seed, bytes):
            raise ValueError(
                "`seed` must be an integer: minimum separation is drawn by NumPy's PCG64. Take one "
                "from secrets.randbits(128)."
            )
        if separation * self.batch_size > self.dataset_size:
            raise ValueError(
                "`separation` times `batch_size` must be at most `dataset_size`, "
                f"{self.dataset_size}, got {separation} times {self.batch_size}. Records that rest "
                "for separation − 1 steps cannot fill the batches."
            )

    @property
    def participation_probability(self) -> float:
        """p, the probability of a record that may take part to do so."""
        resting = (self.separation - 1) * self.batch_size
        return self.batch_size / (self.dataset_size - resting)

    @property
    def chain(self) -> SeparatedChain:
        """With probability p, b − 1 steps of rest."""
        return SeparatedChain(self.separation, self.participation_probability)

    def sample(self, step: int) -> Sample:
        """The records of a step, in time of the order of the batch, of b³ and of a constant.

        2^30 steps are halved down to the one that is asked for. Records in state a where a range
        begins and c where it ends are a group in a keyed random order: as many as are in each
        state b in the middle, a multinomial number, follow each other. The batch are those that
        end the step in state 0; then back up, from places in groups to records.
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
            if step >> (level - 1) & 1:  # of a group (b, c), by where its members come from
                middle, parts = first, lengths[:, last, first].T
                which, place = _located(parts, place)
                first = which
            else:
                middle, parts = last, lengths[first, :, last]
                which, place = _located(parts, place)
                last = which
            before = np.cumsum(lengths, axis=2) - lengths
            place = place + before[first, last, middle]
            place = permuted_within(
                place, whole[first, last], first * len(whole) + last, self._pcg64(1, index, level)
            )
        before = (np.cumsum(whole) - whole.ravel()).reshape(whole.shape)
        place = place + before[first, last]
        everyone = np.full(len(place), self.dataset_size)
        drawn = permuted_within(place, everyone, np.zeros_like(place), self._pcg64(2, 0, 0))
        return self._pad(drawn, self._draws(step))

    def describe(self) -> dict[str, object]:
        """As for every sampler, with b, p and the probability that a step's draw is cut."""
        return {
            **super().describe(),
            "separation": self.separation,
            "participation_probability": self.participation_probability,
            "overflow_probability": self.overflow_probability,
        }

    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        from dpoptax._pricing import events

        return events.separated_event(
            noise_multiplier,
            steps,
            probability=self.participation_probability,
            separation=self.separation,
            overflow=self.full_probability,
        )


def _located(parts: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of its parts each place is in, and where there; `parts` are (places, parts) lengths."""
    ends = np.cumsum(parts, axis=1)
    which = (place[:, None] >= ends).sum(axis=1)
    start = np.take_along_axis(ends - parts, which[:, None], axis=1)[:, 0]
    return which, place - start


@functools.lru_cache(maxsize=8)
def _powers(separation: int, probability: float) -> tuple[np.ndarray, ...]:
    """P^(2^level), P the law of the state after a step given that before it.

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
    """(states, states) how many records are in which where 2^level steps begin, and end."""
    if level < _LEVELS:
        lengths = _lengths(sampler, level + 1, index >> 1)
        return lengths.sum(axis=0).T if index & 1 else lengths.sum(axis=1)
    power = _powers(sampler.separation, sampler.participation_probability)[-1]
    share = sampler.sampling_probability
    # As the run had gone on for ever: in each state but the last with the chance of taking part.
    start = np.full(len(power), share)
    start[-1] = 1 - share * (len(power) - 1)
    law = (start[:, None] * power).ravel()
    drawn = sampler._pcg64(3, 0, 0).multinomial(sampler.dataset_size, law / law.sum())
    return drawn.reshape(power.shape)


@functools.lru_cache(maxsize=2 * _LEVELS)
def _lengths(sampler: MinSeparationSampler, level: int, index: int) -> np.ndarray:
    """(begin, end, middle) how many records are in which state where a range has its middle."""
    half = _powers(sampler.separation, sampler.participation_probability)[level - 1]
    sizes = _sizes(sampler, level, index)
    law = half[:, None, :] * half.T[None, :, :]
    total = law.sum(axis=2, keepdims=True)
    # What cannot happen has no records, and any law does.
    law = np.divide(law, total, out=np.full_like(law, 1 / len(half)), where=total > 0)
    return sampler._pcg64(4, index, level).multinomial(sizes, law)
