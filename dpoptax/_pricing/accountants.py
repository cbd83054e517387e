"""ε, δ and Rényi divergences of an event under each accountant.

Together with the modules below, it closes six gaps of dp_accounting 0.6:

* Its RDP of a Gaussian does not double the sensitivity under replace-one, unlike its PLD (issue 378
  of google/differential-privacy).
* Its PLD supports sampling without replacement only as a special case of truncated sampling, and
  its RDP of nearly full samples exceeds that of full ones.
* Its RDP does not support truncated Poisson sampling, which δ covers here. It also omits the signs
  of the terms of a series at non-integer orders (`renyi`).
* Neither supports random allocation. Here, PLD does.
* Its PLD does not bound the rounding of Fourier transforms (`composition`).
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence

import dp_accounting as dpa
import numpy as np
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event, rdp
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair

from dpoptax import _pricing
from dpoptax._pricing import composition, privacy_losses
from dpoptax._pricing.events import (
    CustomDpEvent,
    GroupDpEvent,
    Parts,
    composition_of,
    parts_of,
    without_truncation,
)

DISCRETIZATION = 1e-4
# PLD states infinity above this ε. The interval of its grid would be so large that its exponential
# overflows and that long compositions are useless.
LARGEST = 1e7
# The smallest δ for which the grid of a whole curve is wide enough.
LEAST_DELTA = 1e-10
# An overflow of batches that does not show in a curve.
_INVISIBLE = 0.1 * LEAST_DELTA
# The largest ratio of the interval to the standard deviation of a loss.
_BLUR = 0.25
# Events that are priced from the curve of another event, on no finer grid.
_DERIVED = dp_event.RepeatAndSelectDpEvent, GroupDpEvent
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
    return _price(parts_of(event), delta, accountant, relation, interval)


@functools.lru_cache(maxsize=4096)
def _price(
    parts: Parts, delta: float, accountant: str, relation: dpa.NeighboringRelation, interval: float
) -> float:
    plain, overflow, only_by_delta = without_truncation(parts)
    # Only "pld" prices a cut, and not every cut. In all other cases δ must cover it.
    if overflow >= delta and (only_by_delta or accountant == "rdp"):
        raise ValueError(
            f"`delta` must be above {overflow:.3g}, the probability that the sampler's largest "
            f"batch is full in this run, or that a stated release fails, got {delta}. Pass a "
            "larger `max_batch_size` or `delta`, or accountant='pld' instead of 'rdp'."
        )
    if accountant == "rdp":
        return float(_rdp_accountant(plain, relation).get_epsilon(delta - overflow))
    # Pricing the truncation takes several times as long, and does not matter if it is rare.
    if only_by_delta or overflow <= 1e-3 * delta:
        parts, delta = plain, delta - overflow
    pairs, interval = _privacy_losses(parts, plain, delta, relation, interval)
    return math.inf if pairs is None else composition.composed_epsilon(pairs, interval, delta)


def curves_of(
    event: Event,
    relation: dpa.NeighboringRelation,
    interval: float,
    *,
    least_delta: float = LEAST_DELTA,
    points: int = 80,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of ε and δ that PLD proves, from ε = 0 to δ = `least_delta`.

    δ is larger at the end if an infinite loss is more probable. If PLD proves no ε there, the only
    pair has an infinite ε. Results are cached as in `epsilon_of`.

    Returns:
      ε, (points,), and δ for removing and for adding a record, (2, points).
    """
    return _curves(parts_of(event), relation, interval, least_delta, points)


@functools.lru_cache(maxsize=256)
def _curves(
    parts: Parts,
    relation: dpa.NeighboringRelation,
    interval: float,
    least_delta: float,
    points: int,
) -> tuple[np.ndarray, np.ndarray]:
    plain, overflow, only_by_delta = without_truncation(parts)
    if only_by_delta or overflow <= max(1e-3 * least_delta, _INVISIBLE):
        parts = plain  # as for ε, truncation is priced step by step only if it matters
    else:
        overflow = 0.0
    pairs, interval = _privacy_losses(parts, plain, least_delta, relation, interval)
    most = math.inf
    if pairs is not None:
        # No ε holds at a δ of at most the probability of an infinite loss.
        # The factor leaves a δ above it, which the finite losses can use.
        least_delta = max(least_delta, 1.01 * composition.least_delta(pairs, interval))
        most = composition.composed_epsilon(pairs, interval, min(least_delta, 1.0))
    if not math.isfinite(most):
        return np.array([math.inf]), np.ones((2, 1))
    # Denser at small ε, where the error rates of a test take all sizes.
    epsilons = most * np.linspace(0, 1, points) ** 1.5
    deltas = composition.deltas_by_direction(pairs or [], interval, epsilons)
    # `composed_epsilon` has proved this δ at the last ε.
    deltas[:, -1] = np.minimum(deltas[:, -1], least_delta)
    deltas = np.minimum(deltas + overflow, 1.0)
    epsilons.flags.writeable = deltas.flags.writeable = False
    return epsilons, deltas


def delta_of(
    event: Event, epsilon: float, accountant: str, relation: dpa.NeighboringRelation
) -> float:
    """Returns the least δ that the accountant proves at an ε of at least 0."""
    parts = parts_of(event)
    plain, overflow, only_by_delta = without_truncation(parts)

    if accountant == "rdp":
        found = float(_rdp_accountant(plain, relation).get_delta(epsilon))
        return min(1.0, found + overflow)

    def price(parts: Parts) -> float:
        pairs, interval = _privacy_losses(parts, plain, LEAST_DELTA, relation, DISCRETIZATION)
        if pairs is None:
            return 1.0
        return float(composition.deltas_of(pairs, interval, np.array([epsilon]))[0])

    found = min(1.0, price(plain) + overflow)
    # As for ε, truncated draws are priced step by step only if covering them by δ matters.
    if only_by_delta or overflow <= 1e-3 * found:
        return found
    # Both bounds hold.
    return min(found, price(parts))


def guessed_epsilon(plain: Parts, delta: float, relation: dpa.NeighboringRelation) -> float:
    """Returns a rough ε of parts without truncation by RDP, as a starting point."""
    # dp_accounting's accountant below has no custom events, which a selection may also hold, and
    # does not double the sensitivity under replace-one.
    rare = CustomDpEvent, dp_event.RepeatAndSelectDpEvent
    if relation is dpa.NeighboringRelation.REPLACE_ONE or any(
        isinstance(e, rare) for e, _ in plain
    ):
        similar = [
            (e.similar() if isinstance(e, CustomDpEvent) else e, count) for e, count in plain
        ]
        return float(_rdp_accountant(tuple(similar), relation, FEW_ORDERS).get_epsilon(delta))
    # At integer orders, dp_accounting suffices, and `renyi` need not be imported.
    accountant = rdp.RdpAccountant(FEW_ORDERS, relation)
    with _remedy_for_unsupported("rdp", plain, relation):
        for event, count in plain:
            accountant.compose(event, count)
    return float(accountant.get_epsilon(delta))


def _privacy_losses(
    parts: Parts, plain: Parts, delta: float, relation: dpa.NeighboringRelation, interval: float
) -> tuple[list[tuple[Pair, int]] | None, float]:
    """Returns the privacy losses of the parts, or None, and the interval of their grid.

    The grid spans the privacy loss, so its size grows with ε. A rough ε above 2000 is that of order
    2, and ε is above 50. A coarser grid then keeps four digits and bounds the memory. The rough ε
    is that of `plain`, the parts without truncation.
    """
    try:
        rough = guessed_epsilon(plain, delta, relation)
    except ValueError:
        # No RDP is known for the event, so the grid keeps its interval.
        rough = 0.0
    if rough > LARGEST:
        return None, interval
    if rough > 2000:
        # About 10^6 losses up to ε.
        interval = max(interval, 1e-6 * rough)
    with _remedy_for_unsupported("pld", parts, relation):
        pairs = privacy_losses.pairs_of(parts, relation, interval)
        if any(isinstance(event, _DERIVED) for event, _ in parts):
            return pairs, interval
        # The grid moves each loss by up to an interval, which adds up over many small losses.
        # `blur` is 0, which ends the loop, if the next grid would be too large.
        while pairs and composition.blur(pairs, interval) > _BLUR:
            interval /= 4
            pairs = privacy_losses.pairs_of(parts, relation, interval)
    return pairs, interval


def _rdp_accountant(
    parts: Parts, relation: dpa.NeighboringRelation, orders: Sequence[float] | None = None
) -> rdp.RdpAccountant:
    with _remedy_for_unsupported("rdp", parts, relation):
        return _pricing.renyi.accountant_of(parts, relation, orders)


@contextlib.contextmanager
def _remedy_for_unsupported(
    kind: str, parts: Parts, relation: dpa.NeighboringRelation
) -> Iterator[None]:
    """Adds a remedy to the errors of dp_accounting for events that it does not support."""
    try:
        yield
    except dpa.UnsupportedEventError as error:
        raise ValueError(
            f"The accountant {kind!r} does not support the event {composition_of(parts)} under the "
            f"neighboring relation {relation.name}. Try accountant="
            f"{'pld' if kind == 'rdp' else 'rdp'!r}, or the neighboring relation of the sampler."
        ) from error
