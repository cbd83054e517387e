"""Search for a parameter of a run whose ε meets a target."""

import dataclasses
import math
from collections.abc import Callable

import dp_accounting as dpa

from dpoptax._pricing import accountants
from dpoptax._pricing.events import parts_of


@dataclasses.dataclass(frozen=True)
class Search:
    """Finds the parameter that spends at most `epsilon`, and nearly all of it.

    Attributes:
      event_at: the event of a run with parameter x; its ε is monotone in x.
      epsilon, delta, accountant, relation: the target and its accounting.
      lowest, highest: the range of x.
      rising: whether ε increases with x.
      digits: significant digits of x; None if x is an integer.
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
        """Returns the parameter and its ε.

        ε exceeds the target only at the end of the range. Three passes each start from the last
        result: RDP over few orders (milliseconds), PLD on a coarse grid (a tenth of the cost), and
        the requested accountant. PLD is slow far from the solution, so the first pass saves most of
        the time. Integers are exact, and other parameters are within 2e-4 of the target ε. With
        Monte Carlo, the second pass draws a tenth of the samples, and the result is within 1e-2,
        since bounds of different parameters vary by that much.
        """
        drawn = self.accountant == "monte_carlo"
        exact = (1e-2 if drawn else 2e-4) if self.digits else 0.0

        def guessed(x: float) -> float:
            return accountants.guessed_epsilon(
                parts_of(self.event_at(x)), self.delta, self.relation
            )

        def priced(x: float, interval: float = accountants.DISCRETIZATION) -> float:
            return accountants.epsilon_of(
                self.event_at(x), self.delta, self.accountant, self.relation, interval
            )

        def coarse(x: float) -> float:
            return priced(x, 10 * accountants.DISCRETIZATION)

        # Each pass starts with the slope of the previous one.
        x, _, slope = self._boundary(guessed, start, 1.0 if self.rising else -1.0, 1e-2)
        if self.accountant != "rdp":
            x, _, slope = self._boundary(coarse, x, slope, 1e-2 if drawn else 2e-3)
        x, spent, _ = self._boundary(priced, x, slope, exact)
        return x, spent

    def _boundary(
        self, spent_at: Callable[[float], float], x: float, slope: float, tolerance: float
    ) -> tuple[float, float, float]:
        """Runs Newton's method on log ε as a function of log x, kept inside a bracket."""
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
        """Returns the next guess in the bracket; `ratio` is log(spent/ε) at x."""
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
