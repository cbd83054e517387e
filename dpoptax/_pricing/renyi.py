"""Rényi divergences of composed events, as upper bounds with their rounding.

With P = (1 − q) N(0, σ²) + q N(1, σ²) and Q = N(0, σ²), in units of the clipping bound, a step of
Poisson sampling has divergences of at most D_α = log(A_α)/(α − 1) in both directions, with

    A_α = E_Q[(1 + y)^α],    y = q (e^((2z − 1)/(2σ²)) − 1),    E_Q[y] = 0.

At integer orders A_α is a finite sum of positive terms, which dp_accounting computes. Its series
for other orders omits the signs of the terms (version 0.6). For those orders this module integrates

    A_α − 1 = E_Q[g],    g = (1 + y)^α − 1 − α y ≥ 0,

by the trapezoidal rule with a step h. Three errors are bounded.

* *Step.* g is analytic in the strip |Im z| < πσ². On a line Im z = a in it, |1 + y| is at most its
  value on the real axis, |y| is at most that of y + 2q, and the density grows by e^(a²/(2σ²)). So
  the error is at most about 2 e^(a²/(2σ²) − 2πa/h) (A_α + 1 + 2αq) (Trefethen and Weideman, theorem
  5.1). `_step` chooses h so that the exponential is at most e^-L.
* *Ends.* Below −R, g ≤ αq. Above α + R, g ≤ e^(α(2z − 1)/(2σ²)), whose mean there is at most
  e^(α(α − 1)/(2σ²) − R²/(2σ²)). As A_α ≥ max(1, q^α e^(α(α − 1)/(2σ²))), both are at most
  (1 + αq) e^-L A_α for R² = 2σ² (L + min(α log(1/q), α(α − 1)/(2σ²))).
* *Rounding.* g is the difference of two positive numbers. Each is off by a few units in the last
  place times the condition of its exponents. This share of their sum is added.

With little noise this takes too many points. Then the upper bound is the chord between two integer
orders, since log A_α is convex in α.

Sources: Mironov, Talwar, Zhang, "Rényi differential privacy of the sampled Gaussian mechanism"
(2019); Trefethen and Weideman, "The exponentially convergent trapezoidal rule" (2014).
"""

import functools
import math
from collections.abc import Sequence

import attr
import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event, rdp
from dp_accounting.rdp.rdp_privacy_accountant import _effective_gaussian_noise_multiplier
from scipy import special

from dpoptax._pricing.custom_events import StatedDpEvent, WorstOfDpEvent
from dpoptax._pricing.events import Parts, composition_of, parts_of

_UNIT = 2.0**-53
_MOST_POINTS = 2**15
# A_α increases with q, so a smaller q may be replaced by this one.
_LEAST_PROBABILITY = 1e-100


def accountant_of(
    parts: Parts, relation: dpa.NeighboringRelation, orders: Sequence[float] | None = None
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
        sampled = isinstance(
            event, dpa.PoissonSampledDpEvent | dpa.SampledWithoutReplacementDpEvent
        )
        if do_compose and sampled and isinstance(event.event, dpa.GaussianDpEvent):
            # Only asks whether dp_accounting supports the event. The divergences are computed here.
            refused = super()._maybe_compose(event, count, False)
            if refused is None:
                self._rdp += count * sampled_gaussian_rdp(event, orders, relation)
            return refused
        if isinstance(event, StatedDpEvent):
            if do_compose:
                self._rdp += count * _stated_rdp(event, self._orders)
            return None
        if not isinstance(event, WorstOfDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        # Composes each part from zero, to compare their divergences at each order.
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


@functools.lru_cache(maxsize=256)
def sampled_gaussian_rdp(
    event: dpa.DpEvent, orders: tuple[float, ...], relation: dpa.NeighboringRelation
) -> np.ndarray:
    """Computes upper bounds on the Rényi divergences of one sampled Gaussian.

    Composition multiplies them by the number of steps, so a run needs one curve.

    Args:
      event: a Gaussian on a Poisson sample, or on a sample without replacement.
      orders: α > 1; at infinity the divergence is infinite.
      relation: the neighboring relation of the event.

    Returns:
      (orders,) read-only.
    """
    alphas, found = np.asarray(orders, float), np.full(len(orders), np.inf)
    finite = np.isfinite(alphas)
    chosen = alphas[finite]
    if isinstance(event, dpa.PoissonSampledDpEvent):
        logs = _log_moments(event.sampling_probability, event.event.noise_multiplier, chosen)
    else:
        # Both are upper bounds (docs/developers/pricing.md, "Batches of a fixed size").
        logs = np.minimum(_by_dp_accounting(event, chosen, relation), _drawn(event, chosen))
    found[finite] = logs / (chosen - 1)
    found.flags.writeable = False
    return found


def rounding(orders: np.ndarray) -> np.ndarray:
    """Bounds the rounding error of log A_α in double precision.

    Terms are log-gamma functions of up to 6α for the requested orders. With little sampling and
    much noise, rounded divergences could be 0 or negative, which dp_accounting prices as ε = 0.
    """
    return 4e-15 * (np.asarray(orders, float) + 8.0) + 2e-13


def _by_dp_accounting(
    event: dpa.DpEvent, alphas: np.ndarray, relation: dpa.NeighboringRelation
) -> np.ndarray:
    """Computes (α − 1) D_α with dp_accounting, and adds its rounding error."""
    computed = rdp.RdpAccountant(alphas, relation).compose(event).rdp
    return (alphas - 1) * np.maximum(computed, 0.0) + rounding(alphas)


def _drawn(event: dpa.SampledWithoutReplacementDpEvent, alphas: np.ndarray) -> np.ndarray:
    """Computes (α − 1) D_α with the draws revealed, at most that of full batches.

    With probability 1 − B/N the record is not drawn and the sums are equal. The bound of Wang et
    al. exceeds this one if B/N is large.
    """
    q, sigma = event.sample_size / event.source_dataset_size, event.event.noise_multiplier
    with np.errstate(divide="ignore"):
        shares = np.log1p(-min(q, 1.0)), np.log(min(q, 1.0))
    return np.logaddexp(shares[0], shares[1] + _exact(1.0, sigma, alphas)) + rounding(alphas)


def _log_moments(q: float, sigma: float, alphas: np.ndarray) -> np.ndarray:
    """Computes upper bounds on log A_α."""
    if not 0 < q < 1 or sigma == 0:
        return _exact(q, sigma, alphas)
    whole = alphas == np.floor(alphas)
    found = np.empty(len(alphas))
    found[whole] = _at_integers(q, sigma, alphas[whole])
    if not whole.all():
        found[~whole] = _between_integers(max(q, _LEAST_PROBABILITY), sigma, alphas[~whole])
    return found


def _exact(q: float, sigma: float, alphas: np.ndarray) -> np.ndarray:
    """Computes log A_α if nothing or everything is sampled, or without noise."""
    if q == 0:
        return np.zeros(len(alphas))
    if sigma == 0:
        return np.full(len(alphas), np.inf)
    return alphas * (alphas - 1) / (2 * sigma**2)


def _at_integers(q: float, sigma: float, alphas: np.ndarray) -> np.ndarray:
    event = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma))
    return _by_dp_accounting(event, alphas, dpa.NeighboringRelation.ADD_OR_REMOVE_ONE)


def _between_integers(q: float, sigma: float, alphas: np.ndarray) -> np.ndarray:
    order, log_q = float(alphas.max()), math.log(q)
    # L is at least 44, and so large that e^-L is negligible next to A_α − 1, about (q/σ)².
    accuracy = 44.0 + 2.0 * max(0.0, math.log(sigma) - log_q)
    step = _step(sigma, accuracy)
    # R + α.
    exponent = min(-order * log_q, order * (order - 1) / (2 * sigma**2))
    reach = sigma * math.sqrt(2 * (accuracy + exponent))
    first, last = math.floor(-reach / step), math.ceil((order + reach) / step)
    if last - first >= _MOST_POINTS:
        return _chords(q, sigma, alphas)

    z = step * np.arange(first, last + 1)
    log_ratio = (z - 0.5) / sigma**2
    # log(1 + y). The second form is for exponentials that might overflow.
    s = np.where(
        log_ratio < 400,
        np.log1p(q * np.expm1(np.minimum(log_ratio, 400.0))),
        np.logaddexp(math.log1p(-q), log_q + log_ratio),
    )
    log_weights = -(z**2) / (2 * sigma**2) + math.log(step / (sigma * math.sqrt(2 * math.pi)))
    found = np.empty(len(alphas))
    for i, alpha in enumerate(alphas):
        # An exponent of size x loses x units in the last place of its exponential.
        units = 1 + (np.abs(z) + 1) * (np.abs(z) + alpha) / sigma**2 - alpha * log_q
        log_g = _log_remainder(s, alpha, 32 * _UNIT * units)
        # log A_α = log(1 + E_Q[g]). The last term exceeds the errors of the step and of both ends.
        total = np.logaddexp(0.0, special.logsumexp(log_weights + log_g))
        found[i] = (1 + 8 * _UNIT) * total + 8 * (1 + alpha * q) * math.exp(-accuracy)
    return found


def _step(sigma: float, accuracy: float) -> float:
    """Computes the largest h with a²/(2σ²) − 2πa/h ≤ −L for some a ≤ πσ²."""
    step = math.pi * sigma * math.sqrt(2 / accuracy)  # for the best a, 2πσ²/h
    strip = math.pi * sigma**2
    # The best a is within the strip if h ≥ 2. Otherwise a is at its edge, πσ².
    return step if step >= 2 else 2 * math.pi * strip / (accuracy + strip**2 / (2 * sigma**2))


def _log_remainder(s: np.ndarray, alpha: float, rounded: np.ndarray) -> np.ndarray:
    """Computes an upper bound on log g, g = (1 + y)^α − 1 − α y, from s = log(1 + y).

    If s is positive, it computes the logarithm of g e^(−αs), so that no exponential overflows.
    """
    # |(1 + y)^α − 1| and α |y|, both times e^(−αs) if s is positive.
    power = -np.expm1(-alpha * np.abs(s))
    linear = -alpha * np.expm1(-np.abs(s)) * np.where(s > 0, np.exp(-(alpha - 1) * np.abs(s)), 1.0)
    difference = np.where(s > 0, power - linear, linear - power)
    with np.errstate(divide="ignore"):
        bound = np.log(np.maximum(difference, 0.0) + rounded * (power + linear))
    return np.maximum(alpha * s, 0.0) + bound


def _chords(q: float, sigma: float, alphas: np.ndarray) -> np.ndarray:
    """Computes chords of log A_α between integer orders, which are upper bounds."""
    orders = np.arange(1.0, math.ceil(alphas.max()) + 1)
    # A_1 = 1.
    logs = np.append(0.0, _at_integers(q, sigma, orders[1:]))
    return np.interp(alphas, orders, logs)
