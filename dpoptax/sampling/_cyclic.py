"""Sampling in turns: groups of records that become eligible one after the other."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpoptax._pricing.checks import integer
from dpoptax.sampling._base import Sample, Sampler, checked_step
from dpoptax.sampling._draws import largest_usual_draw

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True)
class CyclicPoissonSampler(Sampler):
    """Draws Poisson samples from one of `cycle_length` groups at a time, the groups in turns.

    The records are cut into groups of g = ⌊N/cycle_length⌋ by a keyed permutation; step t draws
    from group t mod cycle_length, each of its records with probability B/g, independently. Between
    two possible participations of a record there are cycle_length − 1 other steps, as correlated
    noise needs (`dpoptax.matrix`). With B = g every record takes part in every turn of its
    group: batches in a fixed order, without amplification. With cycle_length = 1 it is Poisson
    sampling.

    Up to cycle_length − 1 records that are left over are never drawn. A draw larger than
    `padded_size` is cut to a uniformly random subset, which happens with probability 10^-12 a step
    and is accounted for.

    Privacy: "replace-special", a record is replaced by one that contributes zero; N is public. Of
    `steps` successive steps a record can be in ⌈steps/cycle_length⌉, each drawn with probability
    B/g: ε is that of releases with none left out.

    Attributes:
      cycle_length: how many groups there are.

    Raises:
      ValueError: an argument is out of range, or `batch_size` is above g.

    >>> sampler = CyclicPoissonSampler(dataset_size=12, batch_size=3, seed=0, cycle_length=4)
    >>> sampler.participation_probability
    1.0
    >>> sorted(int(i) for s in sampler.samples(0, 4) for i in s.indices)
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    """

    cycle_length: int = 1

    neighboring_relation: ClassVar[str] = "replace-special"

    def __post_init__(self) -> None:
        super().__post_init__()
        length = integer("cycle_length", self.cycle_length, 1, "1 is Poisson sampling")
        object.__setattr__(self, "cycle_length", length)
        if self.batch_size > self.group_size:
            raise ValueError(
                f"`batch_size` must be at most the {self.group_size} records of a group, got "
                f"{self.batch_size}. Lower it, or lower cycle_length={length}."
            )

    @property
    def group_size(self) -> int:
        """g, the number of records in a group."""
        return self.dataset_size // self.cycle_length

    @property
    def participation_probability(self) -> float:
        """B/g, the probability that a record is in a given step of its group's turn."""
        return self.batch_size / self.group_size

    @property
    def independent_steps(self) -> bool:
        """Only without turns: steps of some number can be all of one group."""
        return self.cycle_length == 1

    @property
    def padded_size(self) -> int:
        """The length of every sample, and the size that larger draws are cut to."""
        return self._padded(largest_usual_draw(self.group_size, self.participation_probability))

    def sample(self, step: int) -> Sample:
        """The records of a step, from the group whose turn it is."""
        step = checked_step(step)
        draws = self._draws(step)
        rates = self.group_size, self.participation_probability
        drawn = draws.by_chance(*rates, self.padded_size)
        first = (step % self.cycle_length) * self.group_size
        # Apart from every step's draws, whose keys have one number.
        order = self._draws(0, 0)
        return self._pad(order.permuted(first + drawn, self.dataset_size), draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """`steps` sums with independent noise: ⌈steps/cycle_length⌉ over samples of one group."""
        from dpoptax._pricing import events

        return events.truncated_poisson_event(
            noise_multiplier,
            math.ceil(steps / self.cycle_length),
            size=self.group_size,
            probability=self.participation_probability,
            cut_to=self.padded_size,
        )

    def describe(self) -> dict[str, object]:
        """As for every sampler, with the cycle and the probability within a turn."""
        return {
            **super().describe(),
            "cycle_length": self.cycle_length,
            "participation_probability": self.participation_probability,
        }
