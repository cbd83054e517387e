"""Random allocation: each record in exactly k of T steps, which ones is uniform and secret."""

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dpoptax._pricing.checks import integer
from dpoptax._pricing.participation_chains import AllocationChain
from dpoptax.sampling._base import ChainSampler, Sample, checked_step
from dpoptax.sampling._draws import permuted

if TYPE_CHECKING:
    import dp_accounting as dpa

# Up to this many records are put in order by an array of all of them.
_SMALL = 4096


@dataclass(frozen=True)
class RandomAllocationSampler(ChainSampler):
    """Draws each record in exactly k of every T = ⌈k N/B⌉ steps, uniformly chosen.

    The choice is independent of other records and made anew for the next T steps. With k = 1, T is
    an epoch of ⌈N/B⌉ steps, and each record is in exactly one of its batches: balls in bins. With k
    as large as the number of epochs, T is the whole run. Batches have kN/T records on
    average, which is B where B divides k N and otherwise a little less; B remains the divisor of
    the noisy sum.

    A draw larger than `max_batch_size` is cut to a uniformly random subset. By default this happens
    with probability 10^-18 a step; `dp_event` has it, and it is taken out of δ.

    Privacy: "replace-special", a record is replaced by one that contributes zero; N is public.
    ε is that of releases from step 0 on, in order: after a part of T steps that of this part for
    k = 1, and of all T steps otherwise.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        times = integer("participations", self.participations, 1, "1 is once an epoch")
        object.__setattr__(self, "participations", times)

    @property
    def period(self) -> int:
        """T, the number of steps in which each record takes part k times."""
        return -(-self.participations * self.dataset_size // self.batch_size)

    @property
    def sampling_probability(self) -> float:
        """k / T, the probability that a given record is in a given step."""
        return self.participations / self.period

    @property
    def chain(self) -> AllocationChain:
        """In k of each T steps."""
        return AllocationChain(self.period, self.participations)

    def sample(self, step: int) -> Sample:
        """The records of a step.

        By PCG64 in time of the order of the batch and of log T. The T steps are halved down to the
        one that is asked for. Records with c steps to go in a range are a group in a keyed random
        order: as many as have j of them in the left half, a multinomial number, follow on those
        with less. The batch are those with one step to go where it ends; then back up, from places
        in groups to records.
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

    def describe(self) -> dict[str, object]:
        """As for every sampler, with k, T and the probability that a step's draw is cut."""
        return {
            **super().describe(),
            "participations": self.participations,
            "period": self.period,
            "overflow_probability": self.overflow_probability,
        }

    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        from dpoptax._pricing import events

        return events.allocation_event(
            noise_multiplier,
            steps,
            period=self.period,
            participations=self.participations,
            overflow=self.full_probability,
        )

    def _ordered(self, places: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
        """Returns the members of a group of `size` at the places of its random order."""
        rng = self._pcg64(*key)
        return rng.permutation(size)[places] if size <= _SMALL else permuted(places, size, rng)


@functools.lru_cache(maxsize=2)
def _allotted(sampler: RandomAllocationSampler, index: int) -> list[np.ndarray]:
    """The records of each of T steps, by the exact law; k numbers for each record are kept.

    Floyd's way to k of T: a number of range(T − k + j + 1), and that bound where it was drawn.
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
    """Members of a group of the whole range that make a part of a group of its half.

    Attributes:
      to_go: how many steps they have in the half, which names the group there.
      group: how many steps they have in the whole range, which names the group here.
      start: the first one's place in the group here.
      length: how many they are.
    """

    to_go: int
    group: int
    start: int
    length: int


def _places(groups: dict[int, np.ndarray], pieces: list[_Piece]) -> dict[int, np.ndarray]:
    """The places in the groups of a range of places in those of its half."""
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
    """The probabilities that j = 0, ..., count of `count` uniform steps are among the left ones."""
    ways = [math.comb(left, j) * math.comb(right, count - j) for j in range(count + 1)]
    total = math.comb(left + right, count)
    return tuple(way / total for way in ways)
