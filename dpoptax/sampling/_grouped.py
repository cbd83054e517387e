"""Poisson sampling with a probability for each public group of records."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpoptax import _pricing
from dpoptax._support.argument_checks import integer, number
from dpoptax.sampling._base import CutSampler, Sample, checked_step
from dpoptax.sampling._draws import RARE_OVERFLOW_PROBABILITY

if TYPE_CHECKING:
    import dp_accounting as dpa


@dataclass(frozen=True, kw_only=True)
class GroupedPoissonSampler(CutSampler):
    """Draws each record independently, with a probability that depends on its group.

        p_g = w_g B / Σ_h w_h N_h,   for every record of group g

    Records are sorted by group: the first N_0 records are group 0, and so on. A draw above the
    largest size is cut to a uniformly random subset. A step is cut with probability 10^-18;
    `dp_event` includes this probability, and δ covers it.

    Privacy: add-or-remove-one. Every record is priced with the largest probability. A record that
    is drawn less often reveals less: its outputs are a mixture of those with the largest
    probability and those without the record. Groups, their sizes and weights must be public. If the
    group is a private attribute, such as a diagnosis, its counts are private and this sampler would
    publish them. Weight the loss under the clip instead.

    Attributes:
      group_sizes: N_g, the number of records of each group; they add up to `dataset_size`.
      weights: w_g, relative weights; positive and public.

    Raises:
      ValueError: an argument is out of range, sizes and weights do not match, or a probability
        would exceed 1.

    >>> sampler = GroupedPoissonSampler(1000, 48, seed=0, group_sizes=(900, 100), weights=(1, 3))
    >>> sampler.probabilities
    (0.04, 0.12)
    """

    group_sizes: Sequence[int] = ()
    weights: Sequence[float] = ()

    neighboring_relation: ClassVar[str] = "add-or-remove-one"
    _overflow = RARE_OVERFLOW_PROBABILITY
    _described = ("overflow_probability", "group_sizes", "probabilities")

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "count the records of each group"
        sizes = tuple(integer("group_sizes", size, 1, remedy) for size in self.group_sizes)
        weights = tuple(number("weights", weight) for weight in self.weights)
        object.__setattr__(self, "group_sizes", sizes)
        object.__setattr__(self, "weights", weights)
        if len(sizes) != len(weights) or sum(sizes) != self.dataset_size:
            raise ValueError(
                "`group_sizes` must add up to `dataset_size` and have a weight each, got "
                f"{len(sizes)} groups of {sum(sizes)} records, {len(weights)} weights and "
                f"dataset_size={self.dataset_size}."
            )
        if not all(0 < weight < math.inf for weight in weights):
            raise ValueError(f"`weights` must be positive and finite, got {weights}.")
        if max(self.probabilities) > 1:
            raise ValueError(
                "`weights` must give probabilities of at most 1, got "
                f"{max(self.probabilities):.4g}. Lower `batch_size` or the largest weight."
            )

    @property
    def probabilities(self) -> tuple[float, ...]:
        """p_g, the probability of each record of a group in each step."""
        pairs = zip(self.weights, self.group_sizes, strict=True)
        scale = self.batch_size / math.fsum(weight * size for weight, size in pairs)
        exact = (weight * scale for weight in self.weights)
        return tuple(1.0 if 1 < p < 1 + 1e-12 else p for p in exact)  # undo rounding

    def sample(self, step: int) -> Sample:
        """Returns the records of a step."""
        draws = self._draws(checked_step(step))
        firsts = np.cumsum((0, *self.group_sizes))
        drawn = np.concatenate(
            [
                first + draws.by_chance(size, probability, size)
                for first, size, probability in zip(
                    firsts[:-1], self.group_sizes, self.probabilities, strict=True
                )
            ]
        )
        if len(drawn) > self._largest:
            drawn = drawn[draws.subset(len(drawn), self._largest)]
        return self._pad(drawn, draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of `steps` noisy sums with the largest probability."""
        event = _pricing.events.poisson_event(noise_multiplier, max(self.probabilities), steps)
        return _pricing.custom_events.cut_event(event, steps * self.full_probability)
