"""Calibration: the noise or number of steps whose ε meets a target."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._pricing import accountants
from dpoptax._pricing.checks import Accountant, check_accountant, check_delta, relation_named
from dpoptax._pricing.events import parts_of, without_truncation
from dpoptax._pricing.noise_schedule import phases_of, scaled
from dpoptax._pricing.privacy_event import Composable, other_events
from dpoptax._support.argument_checks import integer, number
from dpoptax.accounting._run_event import event_of, run_event, sampler_of, scheme_of

if TYPE_CHECKING:
    from dpoptax.matrix._participation import Participation
    from dpoptax.sampling._base import Sampler

# The ranges of the search.
_MULTIPLIERS = (0.05, 1e6)
_MAX_STEPS = 10**9
# The relative distance of ε from the target that the search distinguishes.
_FAR = 1e-12


def calibrate(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float | Mapping[int, float] | None = None,
    steps: int | None = None,
    sampling_probability: float | None = None,
    sampler: "Sampler | Participation | None" = None,
    schedule: Mapping[int, float] | None = None,
    accountant: Accountant = "pld",
    also: Sequence[Composable] = (),
) -> float:
    """Returns the noise multiplier or number of steps for a budget.

    The result is the number that is left out. The other arguments are those of `planned_guarantee`;
    `epsilon` is for the sums and the events of `also` together.

    - **Without `noise_multiplier`:** the least one, rounded up to five digits. Its ε is at most the
      target and at least 0.9998 of it. `schedule` maps the first step of each phase to a relative
      multiplier. The result is then the factor s: the noise is
      `gaussian_noise(noise_multiplier={t: s * r for t, r in schedule.items()}, ...)`.
    - **Without `steps`:** the largest number of noisy sums, an `int`. With correlated noise, it is
      at most the number of steps of the strategy.

    Raises:
      ValueError: an argument is out of range, not exactly one number is left out, or no number
        spends this ε.

    >>> run = {"epsilon": 2.0, "delta": 1e-5}
    >>> round(calibrate(**run, sampling_probability=0.01, steps=1000), 3)
    0.959
    >>> calibrate(**run, sampling_probability=0.01, noise_multiplier=1.1) // 10
    172
    """
    both = schedule is not None and noise_multiplier is not None
    if (noise_multiplier is None) == (steps is None) or both:
        raise ValueError(
            "Leave out exactly one of `noise_multiplier` and `steps`, got "
            f"noise_multiplier={noise_multiplier}, steps={steps}, schedule={schedule}."
        )
    if steps is not None:
        steps = integer("steps", steps, 1, "a run without steps has no noise and no batch")
    scheme, others = scheme_of(sampling_probability, sampler), other_events(also)
    relative = 1.0 if schedule is None else schedule
    noise = phases_of(relative if noise_multiplier is None else noise_multiplier)

    def event(x: float) -> dpa.DpEvent:
        """Returns the event with x as the number that is left out."""
        # x is the number of steps, the noise multiplier, or the factor of the schedule.
        used = noise if noise_multiplier is not None else scaled(noise, x)
        sums = event_of(scheme, [(int(x) if steps is None else steps, used)])
        return run_event(sums, scheme, others).dp_event

    if not 0 < number("epsilon", epsilon) < math.inf:
        raise ValueError(f"`epsilon` must be positive and finite, got {epsilon}.")
    without_strategy = sampler_of(scheme)
    check_delta(delta, without_strategy.dataset_size)
    check_accountant(accountant)
    target = epsilon, delta, accountant, relation_named(without_strategy.neighboring_relation)
    if noise_multiplier is None:
        search = _Search(event, *target, *_MULTIPLIERS, digits=5)
        return _solution(search, "noise_multiplier", start=1.0)
    # A `BufferedToeplitz` is made for a number of steps and has no price beyond it.
    most = min(_MAX_STEPS, getattr(getattr(sampler, "strategy", None), "steps", _MAX_STEPS))
    return int(_solution(_Search(event, *target, 1, most), "steps", min(1000, most)))


def _solution(search: "_Search", name: str, start: float) -> float:
    """Returns the solution, or raises if it is an end of a range that is there for safety."""
    found, slope, spent = start, 1.0 if search.rising else -1.0, math.inf
    for price, tolerance in search.passes():
        found, spent, slope = search.boundary(price, found, slope, tolerance)
    text = f"{spent:.3g}, which {name}={found:g} spends at delta={search.delta}"
    if spent > search.epsilon:
        raise ValueError(
            f"`epsilon` must be at least {text}, got {search.epsilon}. Raise `epsilon`, "
            "which includes the events in `also`, or `delta` or the noise."
        )
    # The search stopped there, so the budget would allow more steps, or less noise.
    if found == (_MAX_STEPS if name == "steps" else _MULTIPLIERS[0]):
        raise ValueError(
            f"`epsilon` must be below {text}, got {search.epsilon}. Lower `epsilon` or the noise, "
            "or train without noise."
        )
    return found


@dataclasses.dataclass(frozen=True)
class _Search:
    """Searches for the parameter that spends at most `epsilon`, and nearly all of it.

    Attributes:
      event_at: the event of a run with parameter x; its ε is monotone in x.
      epsilon, delta, accountant, relation: the target and its accounting.
      lowest, highest: the range of x.
      digits: significant digits of x, with which ε falls; None if x is an integer, with which it
        rises.
    """

    event_at: Callable[[float], dpa.DpEvent]
    epsilon: float
    delta: float
    accountant: str
    relation: dpa.NeighboringRelation
    lowest: float
    highest: float
    digits: int | None = None

    @property
    def rising(self) -> bool:
        """True if ε increases with x."""
        return self.digits is None

    def passes(self) -> Iterator[tuple[Callable[[float], float], float]]:
        """Yields prices with their tolerances. Each pass starts from the last result and slope.

        First, RDP over few orders takes milliseconds. PLD is slow far from the solution, so this
        saves most of the time. Then PLD is extrapolated from two coarse grids, at a tenth of the
        cost: the excess of a grid over the limit is proportional to the square of its interval.
        Finally, the requested accountant prices the parameter that is returned.
        """
        exact = 2e-4 if self.digits else 0.0

        def priced(x: float, coarseness: int = 1) -> float:
            interval = coarseness * accountants.DISCRETIZATION
            terms = self.delta, self.accountant, self.relation, interval
            return accountants.epsilon_of(self.event_at(x), *terms)

        def guessed(x: float) -> float:
            plain = without_truncation(parts_of(self.event_at(x))).parts
            return accountants.guessed_epsilon(plain, self.delta, self.relation)

        def extrapolated(x: float) -> float:
            # An excess of c h² at interval h is 4 c h² at 2 h, so the difference is 3 c h².
            finer, coarser = priced(x, 20), priced(x, 40)
            return max(finer - (coarser - finer) / 3, finer / 2) if coarser < math.inf else finer

        yield guessed, 1e-2
        if self.accountant == "pld":
            yield extrapolated, max(exact, 1e-4)
        yield priced, exact

    def boundary(
        self, price: Callable[[float], float], x: float, slope: float, tolerance: float
    ) -> tuple[float, float, float]:
        """Runs Newton's method on log ε as a function of log x, kept inside a bracket.

        The last price exceeds the target only at the end of the range. Integers are exact, and
        other parameters are within the tolerance of the target.

        Returns:
          The parameter, its price, and the last slope.
        """
        known: dict[bool, tuple[float, float]] = {}  # x and ε, by whether ε is within the target
        last: tuple[float, float] | None = None
        while True:
            spent = price(x)
            within = spent <= self.epsilon
            known[within] = x, spent
            # An infinite or zero ε counts as very far from the target.
            ratio = math.log(min(max(spent / self.epsilon, _FAR), 1 / _FAR))
            # At the end of the range toward which the search would go on.
            at_end = x == (self.highest if within == self.rising else self.lowest)
            if at_end or (within and -ratio <= tolerance):
                return x, spent, slope
            # The two parameters are neighbors, so no other one is between them.
            if len(known) == 2 and abs(known[True][0] - known[False][0]) < 1.5 * self._unit(x):
                return *known[True], slope
            # log ε is nearly straight in log x, so two or three prices suffice near the solution.
            secant = (ratio - last[1]) / math.log(x / last[0]) if last else slope
            # ε is monotone, so a slope of the other sign is rounding.
            slope = secant if secant * slope > 0 else slope
            last = x, ratio
            # Aims at half the tolerance below the target: a price just above it does not count.
            step = (-ratio - tolerance / 2) / slope
            # At most a factor of e² at once.
            x = self._inside(x * math.exp(max(-2.0, min(2.0, step))), known)

    def _inside(self, x: float, known: Mapping[bool, tuple[float, float]]) -> float:
        """Returns the nearest parameter in the range whose price may still be needed."""
        # With a rising ε, the parameter within the target is below the other one.
        below, above = known.get(self.rising), known.get(not self.rising)
        low = below[0] + self._unit(below[0]) if below else self.lowest
        high = above[0] - self._unit(above[0]) if above else self.highest
        return max(self.lowest, min(self.highest, self._snap(max(low, min(high, x)))))

    def _unit(self, x: float) -> float:
        if self.digits is None:
            return 1
        # The last digit of x. Without 1e-12, log10 may round a power of ten down.
        return 10.0 ** (math.floor(math.log10(x) + 1e-12) + 1 - self.digits)

    def _snap(self, x: float) -> float:
        return float(f"{x:.{self.digits - 1}e}") if self.digits else round(x)
