"""Laws of batches: which records a step may draw, and how many, given the steps before.

A law sorts the records into pools before each step. Records of one pool are interchangeable: given
the number that a step draws from a pool, every subset of that size is equally likely.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptax.sampling import (
    FixedSizeSampler,
    GroupedPoissonSampler,
    MinSeparationSampler,
    PoissonSampler,
    RandomAllocationSampler,
    Sampler,
    ShuffledSampler,
)
from dpoptax.sampling._cyclic import CyclicPoissonSampler

Integers = NDArray[np.int64]

NO_POOL = -1
"""The label of records that the step may not draw."""


class Count(NamedTuple):
    """A number of drawn records, with the law min(Bin(trials, probability), most)."""

    found: int
    trials: int
    probability: float
    most: int

    @property
    def certain(self) -> bool:
        """True if the number is not random."""
        return self.probability in (0.0, 1.0) or not self.trials

    @property
    def possible(self) -> bool:
        """True if the law permits the number."""
        return (
            self.found == self.most * self.probability if self.certain else self.found <= self.most
        )


class Marked(NamedTuple):
    """A number of marked records among `drawn` ones of a pool, with a hypergeometric law."""

    found: int
    pool: int
    marked: int
    drawn: int


class BatchLaw(abc.ABC):
    """Gives the law of each step's batch, given the earlier batches.

    Attributes:
      size: N.
      pools: the number of pools.
      fixed: whether the pools are the same in every step.
    """

    size: int
    pools: int = 1
    fixed: bool = False

    @abc.abstractmethod
    def labels(self, step: int) -> Integers:
        """Returns the pool of each record, (N,), or `NO_POOL`."""

    @abc.abstractmethod
    def counts(self, step: int, members: Integers, drawn: Integers) -> list[Count]:
        """Returns the numbers drawn from the pools; `members` and `drawn` are (pools,)."""

    def shares(self, members: Integers, drawn: Integers) -> list[Marked]:
        """Returns the numbers drawn from a part of several pools that are drawn together."""
        return []

    def advance(self, step: int, rows: Integers) -> None:  # noqa: B027  # pools that never change
        """Takes note of the batch of a step."""


class IndependentLaw(BatchLaw):
    """Every record of pool c with probability q_c, independently; large batches are cut."""

    fixed = True

    def __init__(
        self, sizes: tuple[int, ...], rates: tuple[float, ...], most: int | None = None
    ) -> None:
        self.size, self.pools = sum(sizes), len(sizes)
        self._labels = np.repeat(np.arange(len(sizes)), sizes)
        self._rates, self._most = rates, most

    def labels(self, step: int) -> Integers:
        return self._labels

    def counts(self, step: int, members: Integers, drawn: Integers) -> list[Count]:
        return _independent(members, drawn, self._rates, self._most)


class EpochLaw(BatchLaw):
    """Random subsets of a fixed size, each record at most once in an epoch of some steps."""

    def __init__(self, size: int, batch_size: int, steps: int) -> None:
        self.size, self.fixed = size, steps == 1
        self._batch_size, self._steps = batch_size, steps
        self._labels = np.zeros(size, np.int64)

    def labels(self, step: int) -> Integers:
        if step % self._steps == 0:
            self._labels[:] = 0
        return self._labels

    def counts(self, step: int, members: Integers, drawn: Integers) -> list[Count]:
        left = self.size - step % self._steps * self._batch_size
        size = min(self._batch_size, left)
        return [Count(int(drawn[0]), size, 1.0, size)]

    def advance(self, step: int, rows: Integers) -> None:
        self._labels[rows] = NO_POOL


class AllocationLaw(BatchLaw):
    """Each record in k of T steps: with j to go in n steps, it is drawn with probability j/n."""

    def __init__(self, size: int, period: int, participations: int = 1) -> None:
        self.size, self.pools = size, participations
        self._period = period
        self._to_go = np.full(size, participations)

    def labels(self, step: int) -> Integers:
        if step % self._period == 0:
            self._to_go[:] = self.pools
        return self._to_go - 1

    def counts(self, step: int, members: Integers, drawn: Integers) -> list[Count]:
        left = self._period - step % self._period
        rates = tuple(min(1.0, (pool + 1) / left) for pool in range(self.pools))
        return _independent(members, drawn, rates)

    def advance(self, step: int, rows: Integers) -> None:
        self._to_go[rows] -= 1


class SeparatedLaw(BatchLaw):
    """Each record with probability p unless it rests, from the stationary law on.

    A record that was not drawn in the first t < b steps may have rested before. By stationarity it
    is drawn in step t with probability q/(1 − t q), q = B/N, which is p for t = b − 1.
    """

    def __init__(self, size: int, rate: float, separation: int) -> None:
        self.size = size
        self._rate, self._separation = rate, separation
        self._last = np.full(size, -separation)

    def labels(self, step: int) -> Integers:
        return np.where(step - self._last < self._separation, NO_POOL, 0)

    def counts(self, step: int, members: Integers, drawn: Integers) -> list[Count]:
        rate = self._rate / (1 - min(step, self._separation - 1) * self._rate)
        return _independent(members, drawn, (min(1.0, rate),))

    def advance(self, step: int, rows: Integers) -> None:
        self._last[rows] = step


class CyclicLaw(BatchLaw):
    """Poisson samples of groups of g records that take turns; the groups are not known.

    Pool 0 are the records that were seen in this step's group, pool 1 those not seen at all.
    """

    def __init__(self, size: int, group_size: int, length: int, rate: float, most: int) -> None:
        self.size, self.pools = size, 2
        self._group_size, self._length = group_size, length
        self._rate, self._most = rate, most
        self._group = np.full(size, NO_POOL)

    def labels(self, step: int) -> Integers:
        unseen = np.where(self._group == NO_POOL, 1, NO_POOL)
        return np.where(self._group == step % self._length, 0, unseen)

    def counts(self, step: int, members: Integers, drawn: Integers) -> list[Count]:
        return [Count(int(drawn.sum()), self._group_size, self._rate, self._most)]

    def shares(self, members: Integers, drawn: Integers) -> list[Marked]:
        if members[0] >= self._group_size:
            return [Marked(0, 1, 0, 0)]  # the whole group is known
        total = min(int(drawn.sum()), self._group_size)
        return [Marked(int(drawn[0]), self._group_size, int(members[0]), total)]

    def advance(self, step: int, rows: Integers) -> None:
        self._group[rows] = step % self._length


def _independent(
    members: Integers, drawn: Integers, rates: tuple[float, ...], most: int | None = None
) -> list[Count]:
    return [
        Count(int(found), int(trials), rate, min(int(trials), most or int(trials)))
        for found, trials, rate in zip(drawn, members, rates, strict=True)
    ]


def _poisson_law(claim: PoissonSampler) -> BatchLaw:
    most = None if claim.max_batch_size is None else claim._largest
    return IndependentLaw((claim.dataset_size,), (claim.sampling_probability,), most)


_LAWS: dict[type[Sampler], Callable[..., BatchLaw]] = {
    PoissonSampler: _poisson_law,
    GroupedPoissonSampler: lambda claim: IndependentLaw(
        tuple(claim.group_sizes), claim.probabilities
    ),
    FixedSizeSampler: lambda claim: EpochLaw(claim.dataset_size, claim.batch_size, 1),
    ShuffledSampler: lambda claim: EpochLaw(
        claim.dataset_size, claim.batch_size, claim.steps_per_epoch
    ),
    RandomAllocationSampler: lambda claim: AllocationLaw(
        claim.dataset_size, claim.period, claim.participations
    ),
    MinSeparationSampler: lambda claim: SeparatedLaw(
        claim.dataset_size, claim.sampling_probability, claim.separation
    ),
    CyclicPoissonSampler: lambda claim: CyclicLaw(
        claim.dataset_size,
        claim.group_size,
        claim.cycle_length,
        claim.participation_probability,
        min(claim._largest, claim.group_size),
    ),
}


def law_of(claim: Sampler) -> BatchLaw:
    """Returns the law of a sampler's batches, from step 0 on.

    Raises:
      TypeError: the law of this class is not known here.
      ValueError: batches are cut in a way that changes later steps.
    """
    # A subclass may draw differently.
    if type(claim) not in _LAWS:
        names = ", ".join(sorted(each.__name__ for each in _LAWS))
        raise TypeError(f"`claimed` must be one of {names}, got {claim!r}.")
    chains = RandomAllocationSampler | MinSeparationSampler
    if isinstance(claim, chains) and claim.max_batch_size is not None:
        raise ValueError(
            "`claimed` must have no `max_batch_size`: a record that was cut from a batch "
            f"counts as drawn, and batches do not show it, got {claim.max_batch_size}."
        )
    return _LAWS[type(claim)](claim)
