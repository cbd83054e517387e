"""Rényi divergences of composed events, and the ε and δ that they prove."""

from collections.abc import Sequence

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event, rdp
from dp_accounting.rdp.rdp_privacy_accountant import _effective_gaussian_noise_multiplier

from dpoptax._pricing import renyi
from dpoptax._pricing.custom_events import StatedDpEvent, WorstOfDpEvent
from dpoptax._pricing.events import Parts, composition_of, parts_of


def accountant_of(
    parts: Parts,
    relation: dpa.NeighboringRelation,
    orders: Sequence[float] | None = None,
) -> rdp.RdpAccountant:
    """Returns an accountant with all parts, with doubled sensitivity under replace-one.

    Raises:
      dpa.UnsupportedEventError: a part is not supported under the relation.
    """
    accountant = _RdpAccountant(orders, relation)
    for event, count in parts:
        replaced = relation is dpa.NeighboringRelation.REPLACE_ONE
        accountant.compose(_halved(event) if replaced else event, count)
    return accountant


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
        if do_compose and renyi.is_sampled_gaussian(event):
            refused = super()._maybe_compose(event, count, False)
            if refused is None:
                self._rdp += count * renyi.sampled_gaussian_rdp(event, orders, relation)
            return refused
        if isinstance(event, StatedDpEvent) and do_compose:
            self._rdp += count * _stated_rdp(event, self._orders)
        if isinstance(event, StatedDpEvent):
            return None
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


def _stated_rdp(event: StatedDpEvent, orders: np.ndarray) -> np.ndarray:
    """Returns upper bounds on the Rényi divergences of a release that is (ε, 0)-DP, (orders,).

    It has D_α ≤ ε, and D_α ≤ α ε²/2 (Bun and Steinke, 2016, proposition 1.4).
    """
    if event.delta:
        return np.full(len(orders), np.inf)
    return np.minimum(event.epsilon, orders * event.epsilon**2 / 2 * (1 + 2.0**-50))


def _halved(event: Event) -> Event:
    """Halves the event's multipliers under replace-one, since sums move by 2C."""
    if isinstance(event, dpa.GaussianDpEvent | dpa.LaplaceDpEvent):
        return attr.evolve(event, noise_multiplier=event.noise_multiplier / 2)
    if isinstance(event, dpa.ComposedDpEvent | dpa.SelfComposedDpEvent):
        parts = tuple((_halved(part), count) for part, count in parts_of(event))
        return composition_of(parts)
    if isinstance(event, WorstOfDpEvent):
        return WorstOfDpEvent(tuple(map(_halved, event.events)))
    wrappers = (
        dp_event.RepeatAndSelectDpEvent,
        dpa.PoissonSampledDpEvent,
        dpa.SampledWithoutReplacementDpEvent,
    )
    if isinstance(event, wrappers):
        return attr.evolve(event, event=_halved(event.event))
    if hasattr(event, "event"):
        raise ValueError(
            f"The event {event} is not accounted for here. Use Gaussian noise under composition, "
            "Poisson sampling or sampling without replacement."
        )
    return event
