"""Cyclic Poisson sampling: groups of records take turns."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dpoptax import _pricing
from dpoptax.sampling._base import CutSampler, Sample, checked_step

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampler(CutSampler):
    """Draws Poisson samples from `cycle_length` groups of records that take turns.

    The records are assigned to groups of g = ⌊N/cycle_length⌋ in a random order, which the sampler
    keeps. Step t draws each record of group t mod cycle_length independently with probability B/g.
    A record can take part only in every cycle_length-th step, as correlated noise requires
    (`dpoptax.matrix`). If B = g, every record takes part in every turn of its group: the batches
    have a fixed order, without amplification. cycle_length = 1 is Poisson sampling.

    Up to cycle_length − 1 leftover records are never drawn. A draw above the largest size is cut
    to a uniformly random subset. A step is cut with probability 10^-12, which is accounted for.

    Privacy: "replace-special": a record is replaced by one that contributes zero; N is public. A
    record can be in ⌈steps/cycle_length⌉ of `steps` consecutive steps, in each with probability
    B/g. ε is for consecutive releases.

    Attributes:
      cycle_length: the number of groups.

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

    _described = ("overflow_probability", "cycle_length", "participation_probability")
    _counts: ClassVar = {**CutSampler._counts, "cycle_length": "1 is Poisson sampling"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.group_size:
            raise ValueError(
                f"`batch_size` must be at most the {self.group_size} records of a group, got "
                f"{self.batch_size}. Lower it, or lower cycle_length={self.cycle_length}."
            )

    @property
    def group_size(self) -> int:
        """g, the number of records in a group."""
        return self.dataset_size // self.cycle_length

    @property
    def participation_probability(self) -> float:
        """B/g, the probability that a record is in a given step of its group."""
        return self.batch_size / self.group_size

    @property
    def independent_steps(self) -> bool:
        """True for one group. With several groups, ε depends on the choice of steps."""
        return self.cycle_length == 1

    @property
    def _rates(self) -> tuple[int, float]:
        return self.group_size, self.participation_probability

    def sample(self, step: int) -> Sample:
        """Returns the records of a step, drawn from the group whose turn it is."""
        step = checked_step(step)
        draws = self._draws(step)
        drawn = draws.by_chance(*self._rates, self._largest)
        first = (step % self.cycle_length) * self.group_size
        return self._pad(self._order(0)[first + drawn], draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of ⌈steps/cycle_length⌉ independent noisy sums over one group."""
        turns, batches = math.ceil(steps / self.cycle_length), (*self._rates, self._largest)
        return _pricing.events.truncated_poisson_event(noise_multiplier, turns, *batches)
