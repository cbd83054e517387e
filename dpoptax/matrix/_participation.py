"""The base class of strategies of correlated noise, and their privacy cost with a sampler."""

import abc
import dataclasses
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import numpy as np

from dpoptax import _pricing
from dpoptax.sampling._allocation import RandomAllocationSampler
from dpoptax.sampling._base import Sampler
from dpoptax.sampling._cyclic import CyclicPoissonSampler

if TYPE_CHECKING:
    import dp_accounting as dpa
    from jax_privacy.matrix_factorization.streaming_matrix import StreamingMatrix


S = TypeVar("S", bound=Sampler)

# With fewer, revealing the step modulo the number of bands leaves almost no amplification.
_LEAST_SLOTS = 4


class Strategy(abc.ABC):
    """Lower-triangular Toeplitz matrix A whose columns have l2 norm at most 1.

    With all diagonals this holds up to the rounding of A's parameters to float32. `column` includes
    the rounding, and prices use `column`. Subclasses are frozen dataclasses, static and hashable.
    """

    @property
    @abc.abstractmethod
    def bands(self) -> int | None:
        """The number of nonzero diagonals of A; None if all are nonzero."""

    @abc.abstractmethod
    def column(self, steps: int) -> np.ndarray:
        """Returns the first column of A over `steps` steps, float64.

        The other columns are shifted copies of it.
        """

    @abc.abstractmethod
    def noising_matrix(self) -> "StreamingMatrix":
        """Returns A⁻¹ in float32."""

    @property
    @abc.abstractmethod
    def checkpoint_key(self) -> str:
        """A versioned text that identifies the noise, equal for equal noise.

        Checkpoints store its checksum, so it must not change while the noise is the same. Use a
        name, a version and `float.hex` of each parameter.
        """

    def under(self, sampler: Sampler) -> "Participation":
        """Returns the strategy with a sampler, which `dpoptax.accounting` can price.

        Raises:
          ValueError: an example can take part in several steps with correlated noise, and no ε is
            known for this sampler.
        """
        return Participation(self, sampler)


@dataclasses.dataclass(frozen=True)
class Participation:
    """Strategy with a sampler, to be passed as the sampler to `accounting`.

    Noise multipliers are relative to the clipping bound C: Z has standard deviation
    noise_multiplier · C in each coordinate. The columns of the strategy have l2 norm at most 1.

    Attributes:
      strategy: the strategy of the correlated noise.
      sampler: the sampler of the batches.

    Raises:
      ValueError: no ε is known for this combination.
    """

    strategy: Strategy
    sampler: Sampler

    def __post_init__(self) -> None:
        strategy, sampler = self.strategy, self.sampler
        # With `fixed`, every example takes part once in every cycle, which `sensitivity` prices.
        fixed = _draws_as(sampler, CyclicPoissonSampler) and sampler.participation_probability == 1
        # One band is independent noise. If amplified, an example is in one step within the bands.
        if strategy.bands == 1 or self._amplified or fixed:
            return
        if _draws_as(sampler, RandomAllocationSampler):
            return self._check_allocation(sampler)
        if _draws_as(sampler, CyclicPoissonSampler):
            bands = "every" if strategy.bands is None else f"{strategy.bands} successive"
            raise ValueError(
                "`cycle_length` must be at least the number of bands, or be N/B, "
                f"got {sampler.cycle_length} for a strategy that correlates {bands} step(s). An "
                "example could take part twice within these steps by chance, and no ε is known."
            )
        raise ValueError(
            "`sampler` must be a CyclicPoissonSampler or a RandomAllocationSampler for correlated "
            f"noise, got {type(sampler).__name__}. An example could take part in successive steps, "
            "and no ε is known."
        )

    def _check_allocation(self, sampler: RandomAllocationSampler) -> None:
        """Raises if the strategy has too many bands or a negative entry."""
        bands = self.strategy.bands
        if sampler.participations > 1 or bands is None or _LEAST_SLOTS * bands > sampler.period:
            raise ValueError(
                "`sampler` must be a CyclicPoissonSampler with cycle_length · batch_size = "
                f"dataset_size for a strategy with {bands or 'all'} bands, got {sampler}. A "
                "RandomAllocationSampler has a price with correlated noise if each example is in "
                f"one step of every period, of at least {_LEAST_SLOTS} steps for each band."
            )
        # The pair that prices random participation dominates for entries of at least 0 only
        # (docs/developers/pricing.md, "Random participation with correlated noise").
        least = min(self.strategy.column(bands))
        if least < 0:
            raise ValueError(
                "The first column of the strategy must not be negative if records take part at "
                f"random, got an entry of {least:.3g}. No ε is known for others."
            )

    @property
    def _amplified(self) -> bool:
        bands, sampler = self.strategy.bands, self.sampler
        # A cycle lies between any two steps of an example, so their bands do not overlap.
        return (
            _draws_as(sampler, CyclicPoissonSampler)
            and bands is not None
            and bands <= sampler.cycle_length
        )

    @property
    def independent_steps(self) -> bool:
        """False, since the noise of different steps is correlated."""
        return False

    def check_fixed_point(self) -> None:
        """Raises if no ε is proved for the strategy's noise in fixed point.

        If an example takes part again within the bands, the rounding of the noise depends on it
        several times.
        """
        if self.strategy.bands != 1 and not self._amplified:
            raise ValueError(
                "Correlated noise in fixed point must have a CyclicPoissonSampler whose "
                f"`cycle_length` is at least the number of bands, got {self.sampler} with "
                f"{self.strategy.bands or 'unlimited'} bands."
            )

    def sensitivity(self, steps: int) -> float:
        """Returns the greatest l2 norm that an example adds to A G.

        Gradients are clipped to norm 1. An example that takes part in every cycle adds ‖A u‖, with
        u = 1 in every cycle_length-th step, if the column is nonnegative and nonincreasing (Kalinin
        and Lampert, 2024, Theorem 2). Under other samplers, it may take part in every step.

        Raises:
          ValueError: the column has other entries.
        """
        entries = np.asarray(self.strategy.column(steps), np.float64)
        if np.any(entries < 0) or np.any(np.diff(entries) > 0):
            raise ValueError(
                "The first column of the strategy must be nonnegative and nonincreasing, got "
                f"{self.strategy}. The worst participation is not known for others."
            )
        turn = self.sampler.cycle_length if _draws_as(self.sampler, CyclicPoissonSampler) else 1
        # Entry t of A u is the sum of the column at t, t − cycle, t − 2 cycle, …
        turns = np.pad(entries, (0, -steps % turn)).reshape(-1, turn)
        return float(np.linalg.norm(np.cumsum(turns, axis=0).ravel()[:steps]))

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """Returns the event of `steps` sums with correlated noise."""
        import dp_accounting as dpa

        if self.strategy.bands == 1 or self._amplified:
            return self.sampler.dp_event(noise_multiplier, steps)
        if steps == 0:
            return dpa.NoOpDpEvent()
        if _draws_as(self.sampler, RandomAllocationSampler):
            return _pricing.custom_events.banded_allocation_event(
                noise_multiplier,
                steps,
                column=np.trim_zeros(self.strategy.column(steps), "b").tolist(),
                period=self.sampler.period,
                overflow=self.sampler.full_probability,
            )
        # The whole run is one Gaussian release of A G.
        return _pricing.events.noisy_sum_event(noise_multiplier / self.sensitivity(steps), 1)


def _draws_as(sampler: Sampler, kind: type[S]) -> TypeGuard[S]:
    """Returns whether the sampler is of a kind, and not a subclass that states another event."""
    return isinstance(sampler, kind) and type(sampler).dp_event is kind.dp_event
