"""ε, δ and Rényi divergences of an event under each accountant.

This module closes six gaps of dp_accounting 0.6:

* Its RDP of a Gaussian does not double the sensitivity under replace-one, unlike its PLD (issue 378
  of google/differential-privacy).
* Its PLD supports sampling without replacement only as a special case of truncated sampling, and
  its RDP of nearly full samples exceeds that of full ones.
* Its RDP does not support truncated Poisson sampling, and omits the signs of the terms of a series
  at non-integer orders (`renyi`).
* Neither supports random allocation.
* Its PLD does not bound the rounding of Fourier transforms (`composition`).

Neither can compose random participation in sums with correlated noise. `monte_carlo` prices it for
one run at a time. PLD and RDP price an event that bounds it.
"""

import functools
import math
from typing import Any, TypeVar

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event, pld, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair
from dp_accounting.rdp.rdp_privacy_accountant import _effective_gaussian_noise_multiplier

from dpoptax._pricing import (
    composition,
    importance_sampling,
    monte_carlo,
    one_release,
    random_allocation,
    renyi,
)
from dpoptax._pricing.checks import is_hashable
from dpoptax._pricing.events import (
    GroupDpEvent,
    ParticipationDpEvent,
    RandomAllocationDpEvent,
    WorstOfDpEvent,
    allocation_as_poisson,
    bounded,
    gaussian_event,
    joint_multiplier,
    overflows,
    rewrite,
    without_truncation,
)

AnyAccountant = TypeVar("AnyAccountant", bound=dpa.PrivacyAccountant)

DISCRETIZATION = 1e-4
# PLD states infinity above this ε. The interval of its grid would be so large that its exponential
# overflows and that long compositions are useless.
LARGEST = 1e7
# Covers the rounding of a joint multiplier: four roundings of a few units of 2^-53.
_LESS = 1 - 2.0**-49
# The largest ε of the Monte Carlo search. Exponentials of larger values might overflow.
_MOST_DRAWN = 500.0
# The smallest δ for which the grid of a whole curve is wide enough.
LEAST_DELTA = 1e-10
# Enough orders for a starting point, at a hundredth of the cost of all orders.
FEW_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 512)


def epsilon_of(
    event: Event,
    delta: float,
    accountant: str,
    relation: dpa.NeighboringRelation,
    interval: float = DISCRETIZATION,
) -> float:
    """Returns the least ε at δ that the named accountant proves for the event.

    A coarser interval of the privacy loss makes PLD faster and its bound looser. Prices are cached:
    a run needs the last price of its calibration again, and so do runs with other seeds.
    """
    if accountant != "monte_carlo":
        event = bounded(event)
    arguments = event, delta, accountant, relation, interval
    return (_priced if is_hashable(event) else _price)(*arguments)


def profile_of(
    event: Event,
    relation: dpa.NeighboringRelation,
    interval: float,
    *,
    least_delta: float = LEAST_DELTA,
    points: int = 80,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of ε and δ that PLD proves, from ε = 0 to δ = `least_delta`.

    If PLD proves no ε at `least_delta`, the only pair has an infinite ε. Results are cached as in
    `epsilon_of`.
    """
    epsilons, deltas = curves_of(event, relation, interval, least_delta=least_delta, points=points)
    return epsilons, deltas.max(0)


def curves_of(
    event: Event,
    relation: dpa.NeighboringRelation,
    interval: float,
    *,
    least_delta: float,
    points: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns ε as `profile_of`, and δ for removing and for adding a record, (2, points)."""
    event = bounded(event)
    arguments = event, relation, interval, least_delta, points
    return (_computed_curves if is_hashable(event) else _curves)(*arguments)


def _curves(
    event: Event,
    relation: dpa.NeighboringRelation,
    interval: float,
    least_delta: float,
    points: int,
) -> tuple[np.ndarray, np.ndarray]:
    plain, overflow = without_truncation(event)
    if overflows(event) or overflow <= 1e-3 * least_delta:
        event = plain  # as for ε, truncation is priced step by step only if it matters
    else:
        overflow = 0.0
    accountant = _pld_accountant(event, least_delta, relation, interval)
    most = accountant.get_epsilon(least_delta)
    if not math.isfinite(most):
        return np.array([math.inf]), np.ones((2, 1))
    # Denser at small ε, where the error rates of a test take all sizes.
    epsilons = most * np.linspace(0, 1, points) ** 1.5
    deltas = accountant.get_deltas(epsilons)
    deltas[:, -1] = np.minimum(deltas[:, -1], least_delta)
    deltas = np.minimum(deltas + overflow, 1.0)
    for values in (epsilons, deltas):
        values.flags.writeable = False
    return epsilons, deltas


_computed_curves = functools.lru_cache(maxsize=256)(_curves)


def delta_of(
    event: Event, epsilon: float, accountant: str, relation: dpa.NeighboringRelation
) -> float:
    """Returns the least δ that the accountant proves at an ε of at least 0.

    "monte_carlo" only bounds ε at a given δ. In this case "pld" prices the bounding event.
    """
    event = bounded(event)
    plain, overflow = without_truncation(event)

    def price(event: Event) -> float:
        if accountant == "rdp":
            found = _compose(_RdpAccountant(None, relation), _for_rdp(event, relation))
            return float(found.get_delta(epsilon))
        found = _pld_accountant(event, LEAST_DELTA, relation, DISCRETIZATION)
        return float(found.get_delta(np.array([epsilon]))[0])

    found = min(1.0, price(plain) + overflow)
    # As for ε, truncated draws are priced step by step only if covering them by δ matters.
    if overflows(event) or overflow <= 1e-3 * found:
        return found
    return min(found, price(event))


def _price(
    event: Event,
    delta: float,
    accountant: str,
    relation: dpa.NeighboringRelation,
    interval: float,
) -> float:
    if accountant == "monte_carlo":
        return _monte_carlo_epsilon(event, delta, relation, interval)
    plain, overflow = without_truncation(event)
    only_by_delta = overflow > 0 and overflows(event)
    if overflow >= delta and only_by_delta:
        raise ValueError(
            f"`delta` must be above {overflow:.3g}, the probability that the sampler's largest "
            f"batch is full in this run, got {delta}. Pass a larger `max_batch_size` or a larger "
            "`delta`."
        )

    def price(event: Event, delta: float) -> float:
        if accountant == "rdp":
            return _rdp_epsilon(event, delta, relation)
        return _pld_epsilon(event, delta, relation, interval)

    # Pricing the truncation takes several times as long, and does not matter if it is rare.
    if only_by_delta or overflow <= 1e-3 * delta:
        return price(plain, delta - overflow)
    if accountant == "rdp" and overflow < delta:
        return min(price(plain, delta - overflow), price(event, delta))
    return price(event, delta)


_priced = functools.lru_cache(maxsize=4096)(_price)


def guessed_epsilon(event: Event, delta: float, relation: dpa.NeighboringRelation) -> float:
    """Returns a rough ε by RDP without truncation, as a starting point."""
    plain = rewrite(without_truncation(bounded(event))[0], allocation_as_poisson)
    return _rdp_epsilon(plain, delta, relation, FEW_ORDERS)


def rdp_curve(event: Event, orders: np.ndarray, relation: dpa.NeighboringRelation) -> np.ndarray:
    """Returns Rényi divergences, with doubled sensitivity under replace-one."""
    event = bounded(event)
    return _compose(_RdpAccountant(orders, relation), _for_rdp(event, relation)).rdp


def _monte_carlo_epsilon(
    event: Event, delta: float, relation: dpa.NeighboringRelation, interval: float
) -> float:
    """Returns an upper confidence bound on ε, at most the "pld" price of the bound.

    A coarser interval reduces the number of draws.
    """
    if isinstance(event, dpa.NoOpDpEvent):
        return 0.0
    if isinstance(event, dpa.NonPrivateDpEvent):
        return math.inf
    if not isinstance(event, ParticipationDpEvent):
        raise ValueError(
            "`accountant` must be 'pld' or 'rdp', except for one run with a "
            "RandomAllocationSampler or a MinSeparationSampler, got 'monte_carlo' for an event of "
            f"type {type(event).__name__}."
        )
    if relation is dpa.NeighboringRelation.REPLACE_ONE:
        raise ValueError(
            "`neighboring_relation` must be the sampler's for accountant='monte_carlo', got "
            "'replace_one'."
        )
    known = epsilon_of(event.bound, delta, "pld", relation, interval)
    lowest, highest = random_allocation.MULTIPLIERS
    if event.overflow >= delta or not lowest <= event.noise_multiplier <= highest:
        return known
    run = importance_sampling.Run(event.chain, event.column, event.steps, event.noise_multiplier)
    effort = 1.0 if interval <= DISCRETIZATION else 0.1
    most = min(known, _MOST_DRAWN)
    found = monte_carlo.epsilon_bound(run, delta - event.overflow, most=most, effort=effort)
    return found if found < most else known


class _RdpAccountant(rdp.RdpAccountant):
    """Extends dp_accounting's RDP accountant by further events and cached curves."""

    _rdp: np.ndarray
    _orders: np.ndarray

    def _maybe_compose(
        self, event: Event, count: int, do_compose: bool
    ) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
        orders, relation = tuple(self._orders), self._neighboring_relation
        if isinstance(event, dpa.PoissonSampledDpEvent):
            # Several Gaussians on one sample are equivalent to one with less noise.
            multiplier = _effective_gaussian_noise_multiplier(event.event)
            if isinstance(multiplier, float):
                event = attr.evolve(event, event=dpa.GaussianDpEvent(multiplier))
        if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
            refused = self._maybe_compose(without_truncation(event)[0], count, False)
            if do_compose and refused is None:
                self._rdp += count * renyi.truncated_rdp(event, orders, relation)
            return refused
        if do_compose and renyi.is_sampled_gaussian(event):
            refused = super()._maybe_compose(event, count, False)
            if refused is None:
                self._rdp += count * renyi.sampled_gaussian_rdp(event, orders, relation)
            return refused
        if isinstance(event, RandomAllocationDpEvent):
            refused = _refused_allocation(event, self._neighboring_relation)
            if do_compose and refused is None:
                self._rdp += count * random_allocation.renyi_divergences(
                    event.noise_multiplier, event.period, event.steps, orders
                )
            return refused
        if not isinstance(event, WorstOfDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        worst, before = np.zeros_like(self._rdp), self._rdp
        for part in event.events:
            self._rdp = np.zeros_like(before)
            error = self._maybe_compose(part, count, do_compose)
            if error is not None:
                return error
            worst = np.maximum(worst, self._rdp)
        self._rdp = before + worst
        return None


class _PldAccountant(pld.PLDAccountant):
    """Extends dp_accounting's PLD accountant by random allocation and rounding bounds.

    Each kind of step is built once, and all are composed when ε is requested. Gaussian releases
    without sampling are joined into one.
    """

    _pld: Pair

    def __init__(self, relation: dpa.NeighboringRelation, interval: float) -> None:
        super().__init__(relation, interval)
        self._steps: dict[int, tuple[Pair, int]] = {}
        self._gaussians: list[float] = []

    def get_epsilon(self, target_delta: float) -> float:
        if (pairs := self._pairs()) is None:
            return math.inf
        return composition.epsilon_of(pairs, self._value_discretization_interval, target_delta)

    def get_delta(self, target_epsilon: Any) -> Any:
        return self.get_deltas(target_epsilon).max(0)

    def get_deltas(self, target_epsilon: Any) -> np.ndarray:
        """Returns δ for removing and for adding a record, (2, n)."""
        if (pairs := self._pairs()) is None:
            return np.ones((2, len(target_epsilon)))
        interval = self._value_discretization_interval
        return composition.deltas_by_direction(pairs, interval, target_epsilon)

    def _pairs(self) -> list[tuple[Pair, int]] | None:
        """Returns the pairs with their counts, or None if a part is not private."""
        if self._contains_non_dp_event:
            return None
        pairs = [(self._pld, 1), *self._steps.values()]
        if self._gaussians:
            rounded = _LESS if len(self._gaussians) > 1 else 1.0
            event = gaussian_event(joint_multiplier(self._gaussians) * rounded)
            if not isinstance(event, dpa.GaussianDpEvent):
                return None
            interval = self._value_discretization_interval
            pairs.append((one_release.loss_of(event, self._neighboring_relation, interval), 1))
        return pairs

    def _maybe_compose(
        self, event: Event, count: int, do_compose: bool
    ) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
        interval = self._value_discretization_interval
        if isinstance(event, dpa.GaussianDpEvent) and event.noise_multiplier > 0:
            # Several Gaussians are equivalent to one with less noise.
            event, count = gaussian_event(event.noise_multiplier / math.sqrt(count)), 1
            if isinstance(event, dpa.GaussianDpEvent):
                if do_compose:
                    self._gaussians.append(event.noise_multiplier)
                return None
        if isinstance(event, dp_event.RepeatAndSelectDpEvent | GroupDpEvent):
            if do_compose:
                self._add_by_curve(event, count)
            return None
        if not isinstance(event, RandomAllocationDpEvent):
            own = one_release.is_without_replacement(event) or hasattr(event, "pair")
            if not (own or (do_compose and one_release.is_sampled_gaussian(event))):
                return super()._maybe_compose(event, count, do_compose)
            if do_compose:
                self._add(one_release.loss_of(event, self._neighboring_relation, interval), count)
            return None
        refused = _refused_allocation(event, self._neighboring_relation)
        if do_compose and refused is None:
            points = (
                random_allocation.POINTS
                if interval <= DISCRETIZATION
                else random_allocation.COARSE_POINTS
            )
            sums = event.noise_multiplier, event.period, event.steps
            self._add(random_allocation.pair(*sums, interval, points), count)
        return refused

    def _add_by_curve(self, event: Event, count: int) -> None:
        from dpoptax._pricing import derived_curves

        interval = self._value_discretization_interval
        # The inner curve is rounded on a coarser grid, in the same direction.
        curves = functools.partial(
            curves_of, relation=self._neighboring_relation, interval=10 * interval
        )
        pair = derived_curves.pair(event, curves, interval)
        if pair is None:
            self._contains_non_dp_event = True
        else:
            self._add(pair, count)

    def _add(self, pair: Pair, count: int) -> None:
        before = self._steps.get(id(pair), (pair, 0))[1]
        self._steps[id(pair)] = pair, before + count


def _refused_allocation(
    event: RandomAllocationDpEvent, relation: dpa.NeighboringRelation
) -> dpa.PrivacyAccountant.CompositionErrorDetails | None:
    if event.overflow:
        message = "the overflow of batches must be subtracted from delta first"
    elif relation is dpa.NeighboringRelation.REPLACE_ONE:
        message = "a record is removed or replaced by one that contributes zero, not by another"
    else:
        return None
    return dpa.PrivacyAccountant.CompositionErrorDetails(event, message)


def _rdp_epsilon(
    event: Event,
    delta: float,
    relation: dpa.NeighboringRelation,
    orders: tuple[int, ...] | None = None,
) -> float:
    accountant = _compose(_RdpAccountant(orders, relation), _for_rdp(event, relation))
    return float(accountant.get_epsilon(delta))


def _pld_epsilon(
    event: Event, delta: float, relation: dpa.NeighboringRelation, interval: float
) -> float:
    return float(_pld_accountant(event, delta, relation, interval).get_epsilon(delta))


def _pld_accountant(
    event: Event, delta: float, relation: dpa.NeighboringRelation, interval: float
) -> _PldAccountant:
    # The grid spans the privacy loss, so its size grows with ε. A rough ε above 2000 is that of
    # order 2, and ε is above 50. A coarser grid then keeps four digits and bounds the memory.
    try:
        rough = guessed_epsilon(event, delta, relation)
    except ValueError:
        rough = 0.0
    if rough > LARGEST:
        event = dpa.NonPrivateDpEvent()
    elif rough > 2000:
        interval = max(interval, 1e-6 * rough)
    return _compose(_PldAccountant(relation, interval), event)


def _compose(accountant: AnyAccountant, event: Event) -> AnyAccountant:
    try:
        accountant.compose(event)
        return accountant
    except dpa.UnsupportedEventError as error:
        kind = "rdp" if isinstance(accountant, rdp.RdpAccountant) else "pld"
        other = "pld" if kind == "rdp" else "rdp"
        raise ValueError(
            f"The accountant {kind!r} does not support the event {event} under the neighboring "
            f"relation {accountant.neighboring_relation.name}. Try accountant={other!r}, or the "
            "neighboring relation of the sampler."
        ) from error


def _for_rdp(event: Event, relation: dpa.NeighboringRelation) -> Event:
    """Halves the event's multipliers under replace-one, since sums move by 2C."""
    if relation is not dpa.NeighboringRelation.REPLACE_ONE:
        return event

    def halve(e: Event) -> Event:
        if isinstance(e, (dpa.GaussianDpEvent, dpa.LaplaceDpEvent)):
            return attr.evolve(e, noise_multiplier=e.noise_multiplier / 2)
        return e

    return rewrite(event, halve)
