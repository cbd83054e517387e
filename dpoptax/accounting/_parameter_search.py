"""Search for a parameter of a run whose ε meets a target."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

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

        ε exceeds the target only at the end of the range. Integers are exact, and other parameters
        are within 2e-4 of the target ε. With Monte Carlo, they are within 1e-2, since bounds of
        different parameters vary by that much.
        """
        x, slope, spent = start, 1.0 if self.rising else -1.0, math.inf
        for price, tolerance in self._passes():
            x, spent, slope = self._boundary(price, x, slope, tolerance)
        return x, spent

    def _passes(self) -> Iterator[tuple[Callable[[float], float], float]]:
        """Yields prices with their tolerances. Each pass starts from the last result and slope.

        First, RDP over few orders takes milliseconds. PLD is slow far from the solution, so this
        saves most of the time. Then PLD is extrapolated from two coarse grids, at a tenth of the
        cost: the excess of a grid over the limit is proportional to the square of its interval.
        Finally, the requested accountant prices the parameter that is returned. With Monte Carlo,
        the second pass draws a tenth of the samples.
        """
        drawn = self.accountant == "monte_carlo"
        exact = (1e-2 if drawn else 2e-4) if self.digits else 0.0

        def priced(x: float, coarseness: int = 1) -> float:
            interval = coarseness * accountants.DISCRETIZATION
            event = self.event_at(x)
            return accountants.epsilon_of(
                event, self.delta, self.accountant, self.relation, interval
            )

        def guessed(x: float) -> float:
            parts = parts_of(self.event_at(x))
            return accountants.guessed_epsilon(parts, self.delta, self.relation)

        def extrapolated(x: float) -> float:
            finer, coarser = priced(x, 20), priced(x, 40)
            return max(finer - (coarser - finer) / 3, finer / 2) if coarser < math.inf else finer

        yield guessed, 1e-2
        if self.accountant == "pld":
            yield extrapolated, max(exact, 1e-4)
        if drawn:
            yield functools.partial(priced, coarseness=10), 1e-2
        yield priced, exact

    def _boundary(
        self, price: Callable[[float], float], x: float, slope: float, tolerance: float
    ) -> tuple[float, float, float]:
        """Runs Newton's method on log ε as a function of log x, kept inside a bracket."""
        known: dict[bool, tuple[float, float]] = {}  # x and ε, by whether ε is within the target
        last: tuple[float, float] | None = None
        while True:
            spent = price(x)
            within = spent <= self.epsilon
            known[within] = x, spent
            ratio = math.log(spent / self.epsilon) if 0 < spent < math.inf else None
            if ratio is not None:
                if last is not None and last[0] != x and last[1] != ratio:
                    secant = (ratio - last[1]) / math.log(x / last[0])
                    slope = secant if (secant > 0) == self.rising else slope
                last = x, ratio
            at_end = x == (self.highest if within == self.rising else self.lowest)
            if at_end or (within and ratio is not None and -ratio <= tolerance):
                return x, spent, slope
            if len(known) == 2 and abs(known[True][0] - known[False][0]) < 1.5 * self._unit(x):
                return *known[True], slope
            x = self._next(x, ratio, slope, tolerance, known)

    def _next(
        self,
        x: float,
        ratio: float | None,
        slope: float,
        tolerance: float,
        known: Mapping[bool, tuple[float, float]],
    ) -> float:
        """Returns the next guess in the bracket; `ratio` is log(spent/ε) at x."""
        below, above = known.get(self.rising), known.get(not self.rising)
        low = below[0] + self._unit(below[0]) if below else self.lowest
        high = above[0] - self._unit(above[0]) if above else self.highest
        if ratio is not None:
            guess = x * math.exp(max(-2.0, min(2.0, (-ratio - tolerance / 2) / slope)))
        elif below and above:
            guess = math.sqrt(low * high)
        else:
            guess = x * math.exp(2.0 if below else -2.0)
        return max(self.lowest, min(self.highest, self._snap(max(low, min(high, guess)))))

    def _unit(self, x: float) -> float:
        if self.digits is None:
            return 1
        return 10.0 ** (math.floor(math.log10(x) + 1e-12) + 1 - self.digits)

    def _snap(self, x: float) -> float:
        return float(f"{x:.{self.digits - 1}e}") if self.digits else round(x)
