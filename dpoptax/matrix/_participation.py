"""A strategy of correlated noise under a sampler, and the privacy cost of the pair."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from dpoptax._pricing import participation_chains
from dpoptax.sampling import Sampler
from dpoptax.sampling._base import ChainSampler
from dpoptax.sampling._cyclic import CyclicPoissonSampler

if TYPE_CHECKING:
    import dp_accounting as dpa

    from dpoptax.matrix._strategies import Strategy


@dataclasses.dataclass(frozen=True)
class Participation:
    """A strategy under a sampler; it replaces the sampler in the functions of `accounting`.

    Noise multipliers are relative to the clip bound: Z has standard deviation noise_multiplier · C
    in each coordinate, and the columns of the strategy have norm 1 at most.

    Attributes:
      strategy: how noise is correlated.
      sampler: how batches are drawn.

    Raises:
      ValueError: the two do not fit; no ε is known.
    """

    strategy: "Strategy"
    sampler: Sampler

    def __post_init__(self) -> None:
        strategy, sampler = self.strategy, self.sampler
        if (
            strategy.bands == 1
            or self._amplified
            or self._fixed
            or isinstance(sampler, ChainSampler)
        ):
            return
        if isinstance(sampler, CyclicPoissonSampler):
            bands = "every" if strategy.bands is None else f"{strategy.bands} successive"
            raise ValueError(
                "`cycle_length` must be at least the number of bands, or be N/B, "
                f"got {sampler.cycle_length} for a strategy that correlates {bands} step(s). An "
                "example could take part twice within these steps by chance, and no ε is known."
            )
        raise ValueError(
            "`sampler` must be a CyclicPoissonSampler, MinSeparationSampler or "
            f"RandomAllocationSampler for correlated noise, got {type(sampler).__name__}. An "
            "example could take part in successive steps, and no ε is known."
        )

    @property
    def _amplified(self) -> bool:
        bands, sampler = self.strategy.bands, self.sampler
        return (
            isinstance(sampler, CyclicPoissonSampler)
            and bands is not None
            and bands <= sampler.cycle_length
        )

    @property
    def _fixed(self) -> bool:
        sampler = self.sampler
        return isinstance(sampler, CyclicPoissonSampler) and sampler.participation_probability == 1

    @property
    def dataset_size(self) -> int:
        """N, the number of records that the sampler draws from."""
        return self.sampler.dataset_size

    @property
    def batch_size(self) -> int:
        """B, the expected number of examples in one of the sampler's batches."""
        return self.sampler.batch_size

    @property
    def neighboring_relation(self) -> str:
        """The neighboring relation of the sampler."""
        return self.sampler.neighboring_relation

    @property
    def independent_steps(self) -> bool:
        """False, since later steps take noise back."""
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
        """Returns the l2 norm that one example with clipped gradients of norm 1 can add to C G.

        An example that takes part in every cycle has ‖C u‖, with u = 1 in every cycle_length-th
        step, if the column is nonnegative and nonincreasing (Kalinin and Lampert, 2024, Theorem 2).
        An example that takes part by chance has the largest ‖C x‖ of all its participations x, if
        the column is nonnegative.

        Raises:
          ValueError: any other column.
        """
        if isinstance(self.sampler, ChainSampler):
            from dpoptax._pricing import events

            column = events.shortest(self.strategy.column(steps).tolist())
            return participation_chains.lattice(self.sampler.chain, column, steps).greatest_norm()
        entries = np.asarray(self.strategy.column(steps), np.float64)
        if np.any(entries < 0) or np.any(np.diff(entries) > 0):
            raise ValueError(
                "The first column of the strategy must be nonnegative and nonincreasing, got "
                f"{self.strategy}. The worst participation is not known for others."
            )
        turn = getattr(self.sampler, "cycle_length", 1)
        turns = np.pad(entries, (0, -steps % turn)).reshape(-1, turn)
        return float(np.linalg.norm(np.cumsum(turns, axis=0).ravel()[:steps]))

    def dp_event(self, noise_multiplier: float, steps: int) -> "dpa.DpEvent":
        """What `steps` sums with correlated noise over this sampler's batches reveal."""
        import dp_accounting as dpa

        from dpoptax._pricing import events

        if self.strategy.bands == 1 or self._amplified:
            return self.sampler.dp_event(noise_multiplier, steps)
        if steps == 0:
            return dpa.NoOpDpEvent()
        unamplified = events.noisy_sum_event(
            noise_multiplier / self.sensitivity(steps), 1, lambda gaussian: gaussian
        )
        if not isinstance(self.sampler, ChainSampler):
            return unamplified
        return events.participation_event(
            noise_multiplier,
            steps,
            column=events.shortest(self.strategy.column(steps).tolist()),
            chain=self.sampler.chain,
            bound=unamplified,
            overflow=self.sampler.full_probability,
        )
