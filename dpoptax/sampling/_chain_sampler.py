"""The base class of samplers that draw participations from a Markov chain."""

import abc
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import numpy as np

from dpoptax import _pricing
from dpoptax._pricing.participation_chains import Chain
from dpoptax.sampling._base import CutSampler, Sample, checked_step
from dpoptax.sampling._draws import RARE_OVERFLOW_PROBABILITY

if TYPE_CHECKING:
    import dp_accounting as dpa


class Stretch(NamedTuple):
    """Consecutive steps that are drawn together.

    Attributes:
      batches: the records of each step.
      waits: (N,), the steps from the end of the stretch to the next participation of each record,
        if it depends on the stretch.
    """

    batches: list[np.ndarray]
    waits: np.ndarray = np.zeros(0, np.int64)


LastStretch: TypeAlias = tuple[int, Stretch]
"""The number of the stretch that a sampler drew last, and the stretch."""


class ChainSampler(CutSampler):
    """Draws the participations of each record from an independent Markov chain.

    Stretches of steps are drawn together, for all records. With correlated noise
    (`dpoptax.matrix`), the run is priced by Monte Carlo.
    """

    neighboring_relation: ClassVar[str] = "replace-special"
    _stated_by = (("dp_event", "_bound"), ("chain",))
    _overflow = RARE_OVERFLOW_PROBABILITY

    @property
    def independent_steps(self) -> bool:
        """False, since the participations of a record depend on each other."""
        return False

    @property
    @abc.abstractmethod
    def chain(self) -> Chain:
        """The law of a record's participations."""

    @property
    @abc.abstractmethod
    def _stretch(self) -> int:
        """The number of steps that are drawn together."""

    @abc.abstractmethod
    def _draw_stretch(self, index: int, last: LastStretch | None) -> Stretch:
        """Draws a stretch, if necessary from the one that was drawn last."""

    def sample(self, step: int) -> Sample:
        """Returns the records of a step, a function of the seed and the step only."""
        index, place = divmod(checked_step(step), self._stretch)
        stretch = self._keep(index, lambda last: self._draw_stretch(index, last))
        drawn, draws = stretch.batches[place], self._draws(index, place)
        if len(drawn) > self._largest:
            drawn = drawn[draws.subset(len(drawn), self._largest)]
        return self._pad(drawn, draws)

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of the first `steps` noisy sums, with cuts of batches."""
        return _pricing.custom_events.participation_event(
            noise_multiplier,
            steps,
            column=(1.0,),
            chain=self.chain,
            overflow=self.full_probability,
            bound=self._bound(noise_multiplier, steps),
        )

    @abc.abstractmethod
    def _bound(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns a composable event that reveals at least as much."""


def batches_of(steps: np.ndarray, records: np.ndarray, count: int) -> list[np.ndarray]:
    """Returns the records of each of `count` steps, from pairs of a step and a record."""
    order = np.argsort(steps, kind="stable")
    ends = np.cumsum(np.bincount(steps, minlength=count))
    return np.split(records[order], ends[:-1])
