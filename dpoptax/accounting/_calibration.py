"""Calibration: the parameter of a run whose epsilon just meets a target, and the search for it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dp_accounting as dpa

from dpoptax._privacy import events
from dpoptax._privacy.checks import (
    ADD_OR_REMOVE,
    Accountant,
    check_accountant,
    check_delta,
    checked_multiplier,
    integer,
    number,
    relation_named,
)

if TYPE_CHECKING:
    from dpoptax.sampling import Sampler

_MULTIPLIERS = (0.05, 1e6)
_MAX_STEPS = 10**9


@dataclass(frozen=True)
class Search:
    """The parameter x in [lowest, highest] closest to spending all of `epsilon`, never more.

    Attributes:
      event_at: the event of a run with parameter x; its epsilon is monotone in x.
      epsilon, delta, accountant, relation: the target and how it is measured.
      rising: whether epsilon grows with x.
      digits: significant digits of x; None where x is an integer.
    """

    event_at: Callable[[float], dpa.DpEvent]
    epsilon: float
    delta: float
    accountant: str
    relation: dpa.NeighboringRelation
    lowest: float
    highest: float
    rising: bool
    digits: int | None = None

    def solve(self, start: float) -> tuple[float, float]:
        """The parameter and its epsilon; above the target only at the far end of the range.

        Three passes, each from the last one's result: RDP over few orders (milliseconds), PLD on
        a coarse grid (a tenth of the cost), and the accountant asked for. PLD at a parameter
        that is far off is the slow case, and the first pass is what avoids it. Integers come
        out exact, others within 2e-4 of the target epsilon.
        """
        exact = 2e-4 if self.digits else 0.0

        def guessed(x: float) -> float:
            return events.guessed_epsilon(self.event_at(x), self.delta, self.relation)

        def priced(x: float, interval: float = events.DISCRETIZATION) -> float:
            return events.epsilon_of(
                self.event_at(x), self.delta, self.accountant, self.relation, interval
            )

        def coarse(x: float) -> float:
            return priced(x, 10 * events.DISCRETIZATION)

        # Where it sets out, each pass knows how steep epsilon is from the one before.
        x, _, slope = self._boundary(guessed, start, 1.0 if self.rising else -1.0, 1e-2)
        if self.accountant == "pld":
            x, _, slope = self._boundary(coarse, x, slope, 2e-3)
        x, spent, _ = self._boundary(priced, x, slope, exact)
        return x, spent

    def _boundary(
        self, spent_at: Callable[[float], float], x: float, slope: float, tolerance: float
    ) -> tuple[float, float, float]:
        """Newton's method on log epsilon against log x, kept inside a bracket."""
        toward_spending = 1 if self.rising else -1
        safe: tuple[float, float] | None = None
        unsafe: tuple[float, float] | None = None
        last: tuple[float, float] | None = None
        while True:
            spent = spent_at(x)
            ratio = math.log(spent / self.epsilon) if 0 < spent < math.inf else None
            if ratio is not None:
                if last is not None and last[0] != x and last[1] != ratio:
                    secant = (ratio - last[1]) / (math.log(x) - math.log(last[0]))
                    slope = secant if secant * toward_spending > 0 else slope
                last = (x, ratio)
            if spent <= self.epsilon:
                safe = (x, spent)
                at_end = x == (self.highest if self.rising else self.lowest)
                if at_end or (ratio is not None and -ratio <= tolerance):
                    return x, spent, slope
            else:
                unsafe = (x, spent)
                if x == (self.lowest if self.rising else self.highest):
                    return x, spent, slope
            if safe and unsafe and abs(safe[0] - unsafe[0]) < 1.5 * self._unit(x):
                return *safe, slope
            x = self._next(x, ratio, slope, tolerance, safe and safe[0], unsafe and unsafe[0])

    def _next(
        self,
        x: float,
        ratio: float | None,
        slope: float,
        tolerance: float,
        safe: float | None,
        unsafe: float | None,
    ) -> float:
        """The next guess; `ratio` is log(spent/epsilon) at x, `safe` and `unsafe` the bracket."""
        toward_spending = 1 if self.rising else -1
        outward = toward_spending if x == safe else -toward_spending
        if ratio is None:
            log_move = 2.0 * outward
        else:
            log_move = max(-2.0, min(2.0, (-ratio - tolerance / 2) / slope))
        proposal = x * math.exp(log_move)
        low, high = self.lowest, self.highest
        if safe is not None and unsafe is not None:
            low, high = min(safe, unsafe), max(safe, unsafe)
            low, high = low + self._unit(low), high - self._unit(high)
            if ratio is None:
                proposal = math.sqrt(low * high)
        elif outward > 0:
            low = x + self._unit(x)
        else:
            high = x - self._unit(x)
        return max(self.lowest, min(self.highest, self._snap(max(low, min(high, proposal)))))

    def _unit(self, x: float) -> float:
        if self.digits is None:
            return 1
        return 10.0 ** (math.floor(math.log10(x) + 1e-12) + 1 - self.digits)

    def _snap(self, x: float) -> float:
        return float(f"{x:.{self.digits - 1}e}") if self.digits else round(x)


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    steps: int,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> float:
    """The least noise multiplier that keeps `steps` noisy sums within `epsilon`.

    The result is rounded up to five digits, and `epsilon()` of it is at most the target and at
    least 0.9998 of it. Arguments as for `epsilon()`.

    Raises:
      ValueError: an argument is out of range, or no multiplier spends this epsilon.

    >>> sigma = calibrate_noise_multiplier(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, steps=1000
    ... )
    >>> round(sigma, 3)
    0.959
    """
    steps = integer("steps", steps, 1, "a run without a step needs no noise")
    design = make_design(sampling_probability, sampler)
    least, most = _MULTIPLIERS
    multiplier, spent = Search(
        lambda x: design(x, steps),
        *_target(epsilon, delta, accountant, sampler=sampler),
        lowest=least,
        highest=most,
        rising=False,
        digits=5,
    ).solve(start=1.0)
    if spent > epsilon:
        raise ValueError(
            f"epsilon={epsilon} is below what any noise_multiplier up to {most:g} reaches at "
            f"delta={delta}: {accountant} gives {spent:.3g} there; raise epsilon or delta"
        )
    if multiplier == least:
        raise ValueError(
            f"epsilon={epsilon} is above what any noise_multiplier down to {least} spends at "
            f"delta={delta}: {spent:.3g}; lower epsilon or delta, or train without noise"
        )
    return multiplier


def calibrate_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_probability: float | None = None,
    sampler: "Sampler | None" = None,
    accountant: Accountant = "pld",
) -> int:
    """The largest number of noisy sums that stays within `epsilon`. Arguments as for `epsilon()`.

    Raises:
      ValueError: an argument is out of range, one step already spends more, or a billion less.

    >>> calibrate_steps(
    ...     epsilon=2.0, delta=1e-5, sampling_probability=0.01, noise_multiplier=1.1
    ... ) // 10
    172
    """
    design = make_design(sampling_probability, sampler)
    multiplier = checked_multiplier(noise_multiplier)
    steps, spent = Search(
        lambda x: design(multiplier, int(x)),
        *_target(epsilon, delta, accountant, sampler=sampler),
        lowest=1,
        highest=_MAX_STEPS,
        rising=True,
    ).solve(start=1000)
    if spent > epsilon:
        raise ValueError(
            f"epsilon={epsilon} is below what a single step spends: {spent:.3g} at "
            f"noise_multiplier={noise_multiplier}; raise epsilon, delta or noise_multiplier"
        )
    if steps == _MAX_STEPS:
        raise ValueError(
            f"epsilon={epsilon} is above what {_MAX_STEPS:g} steps spend: {spent:.3g} at "
            f"noise_multiplier={noise_multiplier}; lower epsilon or noise_multiplier"
        )
    return int(steps)


def calibrate_batch_size(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    dataset_size: int,
    steps: int,
    accountant: Accountant = "pld",
) -> int:
    """The largest expected batch size that stays within `epsilon`, under Poisson sampling.

    At most `dataset_size`, which is what a generous budget returns. Arguments as for
    `epsilon()`; the sampling probability is the batch size over `dataset_size`.

    Raises:
      ValueError: an argument is out of range, or a batch size of one already spends more.

    >>> calibrate_batch_size(
    ...     epsilon=2.0, delta=1e-5, noise_multiplier=1.1, dataset_size=50_000, steps=1000
    ... )
    644
    """
    steps = integer("steps", steps, 1, "a run without a step has no batch")
    dataset_size = integer("dataset_size", dataset_size, 1, "count the training records")
    multiplier = checked_multiplier(noise_multiplier)
    size, spent = Search(
        lambda x: events.poisson_event(multiplier, x / dataset_size, steps),
        *_target(epsilon, delta, accountant, dataset_size=dataset_size),
        lowest=1,
        highest=dataset_size,
        rising=True,
    ).solve(start=max(1, dataset_size // 100))
    if spent > epsilon:
        raise ValueError(
            f"epsilon={epsilon} is below what a batch_size of 1 spends: {spent:.3g} at "
            f"noise_multiplier={noise_multiplier}; raise epsilon, delta or noise_multiplier"
        )
    return int(size)


def make_design(
    sampling_probability: float | None, sampler: "Sampler | None"
) -> Callable[[float, int], dpa.DpEvent]:
    """(noise_multiplier, steps) -> event, from whichever of the two was given."""
    if (sampling_probability is None) == (sampler is None):
        raise ValueError(
            f"sampling_probability={sampling_probability} and sampler={sampler}: pass exactly one"
        )
    if sampler is not None:
        sampler.dp_event(1.0, 0)  # One that has no event says why here, whatever comes first.
        return sampler.dp_event
    probability = number("sampling_probability", sampling_probability)
    if not 0 <= probability <= 1:
        raise ValueError(
            f"sampling_probability={probability} must be in [0, 1]; it is the expected batch size "
            "over the number of records"
        )
    return lambda noise_multiplier, steps: events.poisson_event(
        noise_multiplier, probability, steps
    )


def _target(
    epsilon: float,
    delta: float,
    accountant: str,
    *,
    sampler: "Sampler | None" = None,
    dataset_size: int | None = None,
) -> tuple[float, float, str, dpa.NeighboringRelation]:
    if not 0 < number("epsilon", epsilon) < math.inf:
        raise ValueError(
            f"epsilon={epsilon} must be positive and finite; Gaussian noise reaches no other"
        )
    size = sampler.dataset_size if sampler else dataset_size
    check_delta(delta, size, stacklevel=4)
    check_accountant(accountant)
    relation = sampler.neighbouring_relation if sampler else ADD_OR_REMOVE
    return epsilon, delta, accountant, relation_named(relation)
