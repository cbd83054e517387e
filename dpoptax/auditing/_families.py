"""Families of claims: what is refuted of mechanisms of one kind."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import dp_accounting

from dpoptax._pricing import accountants
from dpoptax._pricing.checks import check_delta, relation_named
from dpoptax._pricing.trade_off_functions import TradeOff, approximate_trade_off, gaussian_trade_off
from dpoptax.accounting._spent import spent_event
from dpoptax.accounting._trade_offs import profile

if TYPE_CHECKING:
    from dpoptax._tree import PyTree
    from dpoptax.sampling import Sampler


@dataclasses.dataclass(frozen=True)
class Family:
    """Mechanisms of one kind, by a parameter that rises as they protect less.

    A bound by a family says: if the mechanism is of this kind, its parameter is no lower.

    Attributes:
      assumes: what a bound by this family takes for granted, for people.
      trade_off: the claim of each parameter, falling as the parameter rises.
      epsilon: ε of the parameter at δ, `epsilon(parameter, delta)`.
      tolerance: how precisely, relatively, the parameter is searched.
      most: the parameter at which a search ends.
    """

    assumes: str
    trade_off: Callable[[float], TradeOff]
    epsilon: Callable[[float, float], float]
    tolerance: float = 1e-6
    most: float = 1e3

    def refuted(self, refutes: Callable[[TradeOff], bool]) -> float:
        """The largest parameter found refuted; 0 where none is."""
        return largest_refuted(
            lambda parameter: refutes(self.trade_off(parameter)), self.tolerance, self.most
        )


def largest_refuted(
    refutes: Callable[[float], bool], tolerance: float = 1e-6, most: float = 1e3
) -> float:
    """By doubling and bisection, where everything below what is refuted is refuted, too.

    Args:
      refutes: whether a parameter above 0 is refuted.
      tolerance: how precisely, relatively; what is returned was itself refuted.
      most: where the search ends. It begins at 2⁻⁶, below which nothing is worth a bound.
    """
    low, high = 0.0, 1.0
    while low == 0.0 and high >= 2.0**-6:
        if refutes(high):
            low, high = high, 2 * high
        else:
            high /= 2
    if low == 0.0:
        return 0.0
    while low < most and refutes(high):
        low, high = high, 2 * high
    while low < most and high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if refutes(middle) else (low, middle)
    return low


def gaussian_family() -> Family:
    """Gaussian mechanisms, by μ.

    >>> family = gaussian_family()
    >>> round(family.epsilon(1.0, 1e-5), 3)
    4.377
    """

    def epsilon(mu: float, delta: float) -> float:
        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta)) if mu else 0.0

    return Family("a Gaussian mechanism", gaussian_trade_off, epsilon)


def approximate_family(delta: float) -> Family:
    """All mechanisms, by ε at δ: assumes nothing.

    >>> approximate_family(1e-5).epsilon(2.0, 1e-5)
    2.0
    """
    check_delta(delta)

    def epsilon(parameter: float, at: float) -> float:
        if at != delta:
            raise ValueError(f"delta={at}: this family knows ε at delta={delta} alone")
        return parameter

    return Family("nothing", lambda eps: approximate_trade_off(eps, delta), epsilon)


def claimed_family(opt_state: "PyTree", sampler: "Sampler", *, same_batches: bool = True) -> Family:
    """What a run's ledgers and its sampler claim, as it is and with other noise.

    The parameter is how many times *less* the noise is than the ledgers say: 1 is the claim. Its
    trade-off function is made of 80 pairs of ε and δ, as `accounting.epsilon_spent` prices the
    events by privacy loss distributions: a lower bound on the exact one, so that less is claimed.
    What it refutes is refuted; but its ε of a parameter, which is an upper bound, bounds the true
    one from below only where the price is exact: independent noise, under a `PoissonSampler`
    without `max_batch_size`. Batches of a fixed size are priced by a pair that none of them has,
    and correlated noise with examples drawn by chance as a Gaussian.

    Args:
      opt_state: holds at least one noise stage's state.
      sampler: the one that drew the batches.
      same_batches: as for `accounting.epsilon_spent`.

    Raises:
      ValueError: as `accounting.epsilon_spent`.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> sampler = dpoptax.sampling.PoissonSampler(dataset_size=8, batch_size=8, seed=0)
    >>> tx = dpoptax.gaussian_noise(noise_multiplier=2.0, batch_size=8, key=jax.random.key(0))
    >>> grad_fn = dpoptax.clipped_grad(lambda p, x: jnp.sum(p * x), dpoptax.l2_clip(1.0))
    >>> grads = grad_fn(dpoptax.gradient_points((), jnp.zeros(2)), jnp.ones((8, 2)))
    >>> _, state = tx.update(grads, tx.init(jnp.zeros(2)))
    >>> claimed_family(state, sampler).trade_off(1.0)([0.1, 0.5]).round(2)
    array([0.78, 0.31])
    """
    relation = relation_named(sampler.neighbouring_relation)
    spent_event(opt_state, sampler, same_batches=same_batches)

    @functools.cache
    def priced(less: float) -> TradeOff:
        event = spent_event(opt_state, sampler, same_batches=same_batches, noise=1 / less)
        return approximate_trade_off(*profile(event, sampler.neighbouring_relation))

    def trade_off(less: float) -> TradeOff:
        # Priced where it is asked for, which takes a second for many steps.
        name = "the claim" if less == 1 else f"the claim with noise / {less:.3g}"
        return TradeOff(name, lambda *rates: priced(less).curve(*rates))

    def epsilon(less: float, delta: float) -> float:
        if not less:
            return 0.0
        event = spent_event(opt_state, sampler, same_batches=same_batches, noise=1 / less)
        return accountants.epsilon_of(event, delta, "pld", relation)

    return Family("the claimed mechanism, with other noise", trade_off, epsilon, 1e-2, 16.0)
