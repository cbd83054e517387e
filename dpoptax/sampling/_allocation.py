"""Random allocation: each record takes part in k of T steps, chosen at random."""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from dpoptax import _pricing
from dpoptax._pricing.participation_chains import AllocationChain
from dpoptax.sampling._base import Sample, checked_step
from dpoptax.sampling._chain_sampler import ChainSampler
from dpoptax.sampling._draws import permuted

if TYPE_CHECKING:
    import dp_accounting as dpa

# Groups of at most this size are permuted as an array.
_SMALL = 4096


@dataclass(frozen=True, kw_only=True)
class RandomAllocationSampler(ChainSampler):
    """Draws each record in exactly k of every T = ⌈k N/B⌉ steps, chosen uniformly.

    The choice is independent of other records, and is made again for the next T steps. If k = 1, T
    is an epoch of ⌈N/B⌉ steps, and each record is in exactly one of its batches (balls in bins). If
    k is the number of epochs, T is the whole run. Batches have kN/T records on average. This is B
    if B divides kN, and slightly less otherwise; the noisy sum is divided by B in both cases.

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

    def sample(self, step: int) -> Sample:
        """Returns the records of a step.

        With PCG64 the time is proportional to the batch size and to log T. The range of T steps is
        halved until only the requested step is left. Records with c participations in a range form
        a group with a keyed random order. A multinomial draw gives the number of members with
        j = 0, …, c of them in the left half, and the members are assigned to j in their order. The
        batch is the group with one participation in the requested step. On the way back, places in
        a group are mapped to places in the groups of the wider range, and finally to records.
        """
        step = checked_step(step)
        index, place = divmod(step, self.period)
        if isinstance(self.seed, bytes):
            drawn, draws = _allotted(self, index)[place], self._draws(index, place)
            if len(drawn) > self._largest:
                drawn = drawn[draws.subset(len(drawn), self._largest)]
            return self._pad(drawn, draws)
        low, high = 0, self.period
        sizes = {self.participations: self.dataset_size}
        path = []
        while high - low > 1:
            middle = (low + high) // 2
            left = place < middle
            pieces = []
            for count, size in sizes.items():
                odds = _halves(middle - low, high - middle, count)
                lengths = self._pcg64(index, low, high, count, 0).multinomial(size, odds)
                for j, end in enumerate(np.cumsum(lengths)):
                    to_go = j if left else count - j
                    if to_go and lengths[j]:
                        pieces.append(_Piece(to_go, count, int(end - lengths[j]), int(lengths[j])))
            path.append((low, high, sizes, pieces))
            sizes = dict.fromkeys((piece.to_go for piece in pieces), 0)
            for piece in pieces:
                sizes[piece.to_go] += piece.length
            low, high = (low, middle) if left else (middle, high)
        groups = {count: np.arange(size) for count, size in sizes.items()}
        if len(groups.get(1, ())) > self._largest:
            cut = self._pcg64(index, place).permutation(len(groups[1]))[: self._largest]
            groups = {1: cut}
        for low, high, sizes, pieces in reversed(path):
            groups = {
                count: self._ordered(places, sizes[count], (index, low, high, count, 1))
                for count, places in _places(groups, pieces).items()
            }
        drawn = groups.get(self.participations, np.zeros(0, np.int64))
        return self._pad(drawn, self._draws(step))

    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        return _pricing.custom_events.allocation_event(
            noise_multiplier,
            steps,
            period=self.period,
            participations=self.participations,
            overflow=self.full_probability,
        )

    def _ordered(self, places: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
        """Returns the members at these places of the random order of a group."""
        rng = self._pcg64(*key)
        return rng.permutation(size)[places] if size <= _SMALL else permuted(places, size, rng)


@functools.lru_cache(maxsize=2)
def _allotted(sampler: RandomAllocationSampler, index: int) -> list[np.ndarray]:
    """Returns the records of each of T steps, drawn from the exact law.

    Floyd's algorithm chooses k of T steps for each record. For j = 0, …, k − 1 it draws a number in
    [0, T − k + j], and takes T − k + j if the number was drawn before. It stores k numbers per
    record.
    """
    draws = sampler._shake256(index)
    size, times, period = sampler.dataset_size, sampler.participations, sampler.period
    steps = np.zeros((times, size), np.int64)
    for j in range(times):
        last = period - times + j
        found = draws.below(np.full(size, last + 1))
        steps[j] = np.where(np.any(steps[:j] == found, axis=0), last, found)
    order = np.argsort(steps, axis=None, kind="stable")
    ends = np.cumsum(np.bincount(steps.ravel(), minlength=period))
    return np.split(order % size, ends[:-1])


class _Piece(NamedTuple):
    """Consecutive members of a group of a range that share a group of its half.

    Attributes:
      to_go: their number of participations in the half, which identifies the group there.
      group: their number of participations in the whole range, which identifies the group here.
      start: the place of the first member in the group here.
      length: the number of members.
    """

    to_go: int
    group: int
    start: int
    length: int


def _places(groups: dict[int, np.ndarray], pieces: list[_Piece]) -> dict[int, np.ndarray]:
    """Maps places in the groups of a half to places in the groups of the whole range."""
    found: dict[int, list[np.ndarray]] = {}
    before = dict.fromkeys(groups, 0)
    for piece in pieces:
        if piece.to_go not in groups:
            continue
        offset = groups[piece.to_go] - before[piece.to_go]
        inside = offset[(offset >= 0) & (offset < piece.length)]
        before[piece.to_go] += piece.length
        if len(inside):
            found.setdefault(piece.group, []).append(inside + piece.start)
    return {count: np.concatenate(parts) for count, parts in found.items()}


@functools.lru_cache(maxsize=65536)
def _halves(left: int, right: int, count: int) -> tuple[float, ...]:
    """Returns the probabilities that j = 0, …, count random steps are on the left."""
    ways = [math.comb(left, j) * math.comb(right, count - j) for j in range(count + 1)]
    total = math.comb(left + right, count)
    return tuple(way / total for way in ways)
