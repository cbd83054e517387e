"""Holds the privacy of a run: sampler, noise multiplier and permitted steps."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import dpoptax
from dpoptax import matrix, sampling

if TYPE_CHECKING:
    from dpoptax import accounting


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The privacy of a run, fixed before the first step.

    Attributes:
        sampler: Draws the batches, with the seed of the run or a seed derived from it.
        noise_multiplier: Noise standard deviation relative to the clip norm; 0 if not private.
        permitted_steps: Number of steps within the budget, at most those of the config.
        promise: The privacy plan of the config's steps. None: no guarantee.
        unproven: Reason why no ε is stated in spite of noise, or None.
        seed: The seed of the config, or the drawn seed.
    """

    sampler: "sampling.Sampler"
    noise_multiplier: float
    permitted_steps: int
    promise: "dpoptax.PrivacyPlan | None"
    unproven: str | None = None
    seed: int = dataclasses.field(default=0, repr=False)

    @property
    def delta(self) -> float | None:
        """δ of the guarantee, or None without a guarantee."""
        return None if self.promise is None else self.promise.delta

    @property
    def strategy(self) -> "matrix.Strategy | None":
        """Strategy of correlated noise, or None for independent noise."""
        return None if self.promise is None else self.promise.strategy

    @property
    def cost(self) -> Any:
        """A value that is equal for plans with the same privacy cost."""
        planned = self.guarantee(self.permitted_steps)
        if planned is None:
            return self.unproven
        return planned.event.dp_event, planned.accountant, self.delta, self.strategy

    def guarantee(self, steps: int) -> "accounting.Guarantee | None":
        """Returns the guarantee of the first `steps` steps, or None without a guarantee."""
        if self.promise is None or self.noise_multiplier == 0:
            return None
        return dataclasses.replace(self.promise, steps=steps).guarantee()

    def epsilon(self, steps: int) -> float | None:
        """Returns ε after `steps` steps, or None without a guarantee."""
        planned = self.guarantee(steps)
        return None if planned is None else planned.stated_epsilon

    def bounds(self, steps: Sequence[int]) -> dict[int, float | None]:
        """Returns a cheap upper bound on ε at each step count, for progress and records.

        With up to 50 counts, each is priced by itself, and the bound exceeds ε by about a percent.
        See `accounting.Guarantee.epsilon_curve`. Budgets and summaries use `epsilon`.
        """
        planned = self.guarantee(max(steps, default=1))
        if planned is None:
            return dict.fromkeys(steps)
        curve = planned.epsilon_curve(steps, planned.stated_delta).tolist()
        return {s: e if math.isfinite(e) else None for s, e in zip(steps, curve, strict=True)}
