"""Families of mechanisms, and their members that an audit refutes."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import dp_accounting

from dpoptax._pricing.trade_off_functions import TradeOff, gaussian_trade_off
from dpoptax._release.read_ledger import read_ledgers
from dpoptax.accounting import Guarantee
from dpoptax.accounting._run_event import drawing_sampler, spent_event

if TYPE_CHECKING:
    from dpoptax._support.tree import PyTree
    from dpoptax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Family:
    """Mechanisms of one kind, by a parameter that increases as privacy decreases.

    A bound by a family is a lower bound on the parameter if the mechanism is of this kind.

    Attributes:
      assumes: the assumption of a bound by this family, in words.
      trade_off: the claim of each parameter, decreasing in the parameter.
      epsilon: ε of the parameter at δ, `epsilon(parameter, delta)`.
      tolerance: relative precision of the search for the parameter.
      most: the parameter at which a search ends.
    """

    assumes: str
    trade_off: Callable[[float], TradeOff]
    epsilon: Callable[[float, float], float]
    tolerance: float = 1e-6
    most: float = 1e3

    def refuted(self, refutes: Callable[[TradeOff], bool]) -> float:
        """Returns the largest refuted parameter, or 0, by doubling and bisection.

        All parameters below a refuted one must be refuted. The result is itself refuted, so the
        search can only make a bound weaker. It begins at 2⁻⁶, since smaller bounds are of no use.
        """
        low, high = 0.0, 1.0
        while low == 0.0 and high >= 2.0**-6:
            if refutes(self.trade_off(high)):
                low, high = high, 2 * high
            else:
                high /= 2
        if low == 0.0:
            return 0.0
        while low < self.most and refutes(self.trade_off(high)):
            low, high = high, 2 * high
        while low < self.most and high / low > 1 + self.tolerance:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if refutes(self.trade_off(middle)) else (low, middle)
        return low


def gaussian_family() -> Family:
    """Returns the family of Gaussian mechanisms, by μ."""

    def epsilon(mu: float, delta: float) -> float:
        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0

    return Family("a Gaussian mechanism", gaussian_trade_off, epsilon)


def claimed_family(opt_state: "PyTree", sampler: "Sampler") -> Family:
    """Returns the family of the claimed mechanism of a run, with other noise.

    The parameter is the factor by which the noise is *smaller* than the ledgers state; 1 is the
    claim. Its trade-off function is that of `accounting.Guarantee`, a lower bound on the exact one.
    So a refutation is valid. The ε of a parameter is an upper bound. It bounds the true ε from
    below only if the price is exact: independent noise, under a `PoissonSampler` without
    `max_batch_size`. Batches of a fixed size are priced by a dominating pair, and correlated noise
    over randomly drawn examples as a Gaussian.
    """
    readings = read_ledgers(opt_state)
    drawn = drawing_sampler(sampler, readings)
    spent_event(readings, drawn, same_batches=True)  # raises before the first trial

    def with_noise(less: float) -> Guarantee:
        event = spent_event(readings, drawn, same_batches=True, noise=1 / less)
        return Guarantee(event, drawn.neighboring_relation)

    @functools.cache
    def priced(less: float) -> TradeOff:
        return with_noise(less).trade_off

    def trade_off(less: float) -> TradeOff:
        # Priced on request, since it takes a second for many steps.
        name = "the claim" if less == 1 else f"the claim with noise / {less:.3g}"
        return TradeOff(name, lambda rates: priced(less).curve(rates))

    def epsilon(less: float, delta: float) -> float:
        return with_noise(less).epsilon(delta) if less else 0.0

    return Family("the claimed mechanism, with other noise", trade_off, epsilon, 1e-2, 16.0)
