"""Laws of batches: which records a step may draw, and how many, given the steps before.

A law sorts the records into pools before each step. Records of one pool are interchangeable: given
the number that a step draws from a pool, every subset of that size is equally likely.
"""

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from dpoptax.auditing._exact_scores import Integers
from dpoptax.sampling import (
    FixedSizeSampler,
    GroupedPoissonSampler,
    PoissonSampler,
    RandomAllocationSampler,
    Sampler,
    ShuffledSampler,
)
from dpoptax.sampling._cyclic import CyclicPoissonSampler

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
        least = self.most * self.probability if self.certain else 0
        return least <= self.found <= self.most


class Marked(NamedTuple):
    """A number of marked records among `drawn` ones of a pool, with a hypergeometric law."""

    found: int
    pool: int
    marked: int
    drawn: int


class Draw(NamedTuple):
    """The law of one step, given the earlier batches.

    Attributes:
      labels: the pool of each record, (N,), or `NO_POOL`. Pools that do not change are one array.
      rates: the probability of each record of a pool, by pool.
      most: the size to which a draw is cut, if it is.
      trials: the number of records that may be drawn, if the pools are drawn together. They are
        then the known and the unknown members of a group of this size.
    """

    labels: Integers
    rates: tuple[float, ...]
    most: int | None = None
    trials: int | None = None

    def counts(self, members: Integers, drawn: Integers) -> list[Count]:
        """Returns the numbers drawn from the pools; `members` and `drawn` are (pools,)."""
        if self.trials is not None:
            members, drawn = np.array([self.trials]), drawn.sum(keepdims=True)
        pairs = zip(drawn.tolist(), members.tolist(), self.rates, strict=False)
        return [Count(found, n, rate, min(n, self.most or n)) for found, n, rate in pairs]

    def shares(self, members: Integers, drawn: Integers) -> list[Marked]:
        """Returns the number drawn from the known members of a group."""
        if self.trials is None or len(self.rates) == 1:
            return []
        if members[0] >= self.trials:
            return [Marked(0, 1, 0, 0)]  # the whole group is known
        total = min(int(drawn.sum()), self.trials)
        return [Marked(int(drawn[0]), self.trials, int(members[0]), total)]


Law: TypeAlias = Generator[Draw, Integers, None]
"""Yields the law of each step, and is sent the rows that the step drew."""


def independent(sizes: tuple[int, ...], rates: tuple[float, ...], most: int | None = None) -> Law:
    """Every record of pool c with probability q_c, independently; large batches are cut."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    while True:
        yield Draw(labels, rates, most)


def epochs(size: int, batch_size: int, steps: int) -> Law:
    """Random subsets of a fixed size, each record at most once in an epoch of some steps."""
    everyone = labels = np.zeros(size, np.int64)
    for step in itertools.count():
        place = step % steps
        labels = everyone if place == 0 else labels
        number = min(batch_size, size - place * batch_size)
        rows = yield Draw(labels, (1.0,), trials=number)
        labels = labels.copy()
        labels[rows] = NO_POOL


def allocation(size: int, period: int, participations: int = 1) -> Law:
    """Each record in k of T steps: with j to go in n steps, it is drawn with probability j/n."""
    for step in itertools.count():
        left = period - step % period
        if left == period:
            to_go = np.full(size, participations)
        rates = tuple(min(1.0, (pool + 1) / left) for pool in range(participations))
        rows = yield Draw(to_go - 1, rates)
        to_go[rows] -= 1


def cyclic(size: int, group_size: int, length: int, rate: float, most: int) -> Law:
    """Poisson samples of groups of g records that take turns; the groups are not known.

    Pool 0 are the records that were seen in this step's group, pool 1 those not seen at all.
    """
    group = np.full(size, NO_POOL)
    for step in itertools.count():
        unseen = np.where(group == NO_POOL, 1, NO_POOL)
        labels = np.where(group == step % length, 0, unseen)
        rows = yield Draw(labels, (rate, rate), most, group_size)
        group[rows] = step % length


_LAWS: dict[type[Sampler], Callable[..., Law]] = {
    PoissonSampler: lambda claim: independent(
        (claim.dataset_size,),
        (claim.sampling_probability,),
        claim.max_batch_size and claim._largest,
    ),
    GroupedPoissonSampler: lambda claim: independent(tuple(claim.group_sizes), claim.probabilities),
    FixedSizeSampler: lambda claim: epochs(claim.dataset_size, claim.batch_size, 1),
    ShuffledSampler: lambda claim: epochs(
        claim.dataset_size, claim.batch_size, claim.steps_per_epoch
    ),
    RandomAllocationSampler: lambda claim: allocation(
        claim.dataset_size, claim.period, claim.participations
    ),
    CyclicPoissonSampler: lambda claim: cyclic(
        claim.dataset_size,
        claim.group_size,
        claim.cycle_length,
        claim.participation_probability,
        min(claim._largest, claim.group_size),
    ),
}


def law_of(claim: Sampler) -> Law:
    """Returns the law of a sampler's batches, from step 0 on.

    Raises:
      TypeError: the law of this class is not known here.
      ValueError: batches are cut in a way that changes later steps.
    """
    # A subclass may draw differently.
    if type(claim) not in _LAWS:
        names = ", ".join(sorted(each.__name__ for each in _LAWS))
        raise TypeError(f"`claimed` must be one of {names}, got {claim!r}.")
    if isinstance(claim, RandomAllocationSampler) and claim.max_batch_size is not None:
        raise ValueError(
            "`claimed` must have no `max_batch_size`: a record that was cut from a batch "
            f"counts as drawn, and batches do not show it, got {claim.max_batch_size}."
        )
    return _LAWS[type(claim)](claim)


def candidates(distinct: Sequence[Integers], claimed: Sampler) -> Iterator[tuple[str, Law]]:
    """Yields names and laws, from special to general, each new and before its first step."""
    sizes = np.array([len(each) for each in distinct])
    number, first, mean = claimed.dataset_size, int(sizes[0]), float(sizes.mean())
    if first:
        yield "shuffled epochs", epochs(number, first, -(-number // first))
        if number % first and len(distinct) > number // first:
            yield "shuffled epochs with drop_last", epochs(number, first, number // first)
    if np.all(sizes == first):
        yield f"batches of {first} without replacement", epochs(number, first, 1)
    if mean:
        period = max(1, round(number / mean))
        yield f"each record once in {period} steps, at random", allocation(number, period)
        law = independent((number,), (mean / number,))
        yield f"Poisson samples of {mean:.4g} on average", law
    rate, most = claimed.sampling_probability, int(sizes.max())
    yield f"Poisson samples cut to {most}", independent((number,), (rate,), most)
