"""The terms of a plan: sampler, noise and steps, and their price."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpoptax._pricing.checks import Accountant
from dpoptax._pricing.privacy_event import PrivacyEvent
from dpoptax._support.rounded import round_up
from dpoptax.accounting._guarantee import Guarantee
from dpoptax.accounting._runs import planned_guarantee
from dpoptax.accounting._statement import claim_text, multipliers_text
from dpoptax.sampling._base import CutSampler, Sampler

if TYPE_CHECKING:
    from dpoptax._clips.clip import Clip
    from dpoptax.matrix._participation import Participation, Strategy


@dataclasses.dataclass(frozen=True, init=False)
class PlanTerms:
    """Holds the part of `PrivacyPlan` that a run may import, because it starts no run.

    Attributes: as for `PrivacyPlan`.
    """

    sampler: Sampler
    steps: int
    noise_multiplier: float | Mapping[int, float]
    delta: float
    strategy: "Strategy | None"
    fixed_point: bool
    accountant: Accountant
    also: tuple[PrivacyEvent, ...]

    @property
    def _scheme(self) -> "Sampler | Participation":
        """The sampling scheme: the sampler, with the strategy if there is one."""
        return self._under_strategy(self.sampler)

    def _under_strategy(self, sampler: Sampler) -> "Sampler | Participation":
        return sampler if self.strategy is None else self.strategy.under(sampler)

    @property
    def _terms(self) -> dict[str, Any]:
        """The arguments that calibration and guarantees share."""
        return {"delta": self.delta, "accountant": self.accountant, "also": self.also}

    @property
    def epsilon(self) -> float:
        """ε of the whole plan at `delta`."""
        return self.guarantee().stated_epsilon

    @property
    def expected_epochs(self) -> float:
        """T B / N."""
        return self.steps * self.sampler.sampling_probability

    def grid(self, clip: "Clip | float") -> float | None:
        """Returns `grid` for `clipped_grad`, with which sums in fixed point are exact.

        It is None without `fixed_point`. See `dpoptax.extend.fixed_point_grid`.

        Raises:
          ValueError: the noise multiplier is 0.

        >>> import dpoptax
        >>> run = {"dataset_size": 100, "batch_size": 10, "steps": 5, "noise_multiplier": 1.0}
        >>> dpoptax.PrivacyPlan(**run).grid(1.0)
        >>> dpoptax.PrivacyPlan(**run, fixed_point=True).grid(1.0) == 2**-18
        True
        """
        if not self.fixed_point:
            return None
        from dpoptax._release.fixed_point import fixed_point_grid

        return fixed_point_grid(
            clip, noise_multiplier=self.noise_multiplier, batch_size=self.sampler.batch_size
        )

    def steps_within(self, budget: float) -> int:
        """Returns the number of the plan's steps that spend at most the ε `budget`.

        Raises:
          ValueError: one step spends more.

        >>> import dpoptax
        >>> terms = {"dataset_size": 90, "batch_size": 9, "steps": 40, "noise_multiplier": 2.0}
        >>> plan = dpoptax.PrivacyPlan(**terms)
        >>> plan.steps_within(1.0), plan.steps_within(2.0)
        (16, 40)
        """
        if self.epsilon <= budget:
            return self.steps
        planned = self.guarantee()

        def spent(steps: int) -> float:
            assert planned.event_after is not None  # a plan has a sequence of steps
            return dataclasses.replace(planned, event=planned.event_after(steps)).stated_epsilon

        # ε increases with the steps, so this counts the numbers of steps within the budget.
        steps = bisect.bisect_right(range(1, self.steps), budget, key=spent)
        if not steps:
            raise ValueError(
                f"One step spends ε = {spent(1):.4g}, more than the budget of {budget}. Raise the "
                "budget, `delta` or the noise multiplier."
            )
        return steps

    def guarantee(self) -> Guarantee:
        """Returns the guarantee of a run that takes all planned steps.

        `PrivateRun.guarantee` states that of the steps that a run has taken.
        """
        return self._guarantee_with(self._scheme)

    def _guarantee_with(self, scheme: "Sampler | Participation") -> Guarantee:
        noise = self.noise_multiplier
        return planned_guarantee(
            noise_multiplier=noise, steps=self.steps, sampler=scheme, **self._terms
        )

    def __str__(self) -> str:
        planned, sampler = self.guarantee(), self.sampler
        size, batch_size = sampler.dataset_size, sampler.batch_size
        # A plan has one noise stage.
        (stage,) = planned.releases
        q = sampler.sampling_probability
        # Random allocation draws slightly fewer than B, if B does not divide N.
        expected = "" if math.isclose(size * q, batch_size) else f", {round(size * q, 1):,.12g}"
        rate = f"{q:.4g}" if expected else f"B/N = {q:.4g}"
        lines = {
            "data": f"N = {size:,} {sampler.unit}s",
            "batches": f"B = {batch_size:,}{expected} expected, q = {rate}, drawn by "
            f"{type(sampler).__name__}",
            "steps": f"T = {self.steps:,}, {self.expected_epochs:.4g} expected epochs",
            "noise": multipliers_text(stage.phases)
            + (
                _stddevs([sigma / batch_size for _, sigma in stage.phases])
                if self.strategy is None
                else f", correlated by {self.strategy}"
            )
            + (", in fixed point" if self.fixed_point else ""),
            "privacy": claim_text(
                planned.stated_epsilon, self.delta, sampler.unit, sampler.neighboring_relation
            ),
        }
        if cut := self._price_of_cut(planned.stated_epsilon):
            lines["cut"] = cut
        return "\n".join(
            [type(self).__name__, *(f"  {name:7}  {text}" for name, text in lines.items())]
        )

    def _price_of_cut(self, epsilon: float) -> str:
        """Returns a hint if draws cut to `max_batch_size` cost ε, or nothing."""
        sampler = self.sampler
        if not isinstance(sampler, CutSampler) or sampler.max_batch_size is None:
            return ""
        uncut = self._under_strategy(sampler.uncut())
        without = self._guarantee_with(uncut).stated_epsilon
        if round_up(without) == round_up(epsilon):
            return ""
        cut = f"draws above {sampler.max_batch_size:,} are cut, which costs privacy"
        return f"{cut}: without `max_batch_size`, ε = {round_up(without)}"


def _stddevs(values: Sequence[float]) -> str:
    most, least = max(values), min(values)
    text = f"{most:.4g} C" if most == least else f"{most:.4g} C to {least:.4g} C"
    return f", σC/B = {text} in each coordinate of a mean"
