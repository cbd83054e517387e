"""The base class of samplers that draw participations from a Markov chain."""

import abc
from typing import TYPE_CHECKING, ClassVar

from dpoptax import _pricing
from dpoptax._pricing.participation_chains import Chain
from dpoptax.sampling._base import CutSampler
from dpoptax.sampling._draws import RARE_OVERFLOW_PROBABILITY

if TYPE_CHECKING:
    import dp_accounting as dpa


class ChainSampler(CutSampler):
    """Draws the participations of each record from an independent Markov chain.

    With correlated noise (`dpoptax.matrix`), the run is priced by Monte Carlo.
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
