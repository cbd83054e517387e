"""Renyi divergences of one sampled Gaussian, at the orders where they can be summed."""

import functools
import math

import dp_accounting as dpa
import numpy as np
from dp_accounting import rdp
from scipy import special


def is_sampled_gaussian(event: dpa.DpEvent) -> bool:
    """Whether the event is one Gaussian on a sample, whose curve is worth keeping."""
    sampled = (dpa.PoissonSampledDpEvent, dpa.SampledWithoutReplacementDpEvent)
    return isinstance(event, sampled) and isinstance(event.event, dpa.GaussianDpEvent)


@functools.lru_cache(maxsize=256)
def sampled_gaussian_rdp(
    event: dpa.DpEvent, orders: tuple[float, ...], relation: dpa.NeighboringRelation
) -> np.ndarray:
    """Renyi divergences of one sampled Gaussian; infinite, which says nothing, where unknown.

    Composition multiplies them by the number of steps, so a run needs one curve. Orders whose
    series dp_accounting would give up are not asked for: epsilon is the least over the orders, so
    that leaving some out never understates it.
    """
    alphas, found = np.asarray(orders, dtype=float), np.full(len(orders), np.inf)
    chosen = np.ones(len(orders), dtype=bool)
    if isinstance(event, dpa.PoissonSampledDpEvent):
        chosen = summable(event.sampling_probability, event.event.noise_multiplier, alphas)
    computed = rdp.RdpAccountant(alphas[chosen], relation).compose(event).rdp
    found[chosen] = np.maximum(computed, 0.0) + rounding(alphas[chosen]) / (alphas[chosen] - 1)
    found.flags.writeable = False
    return found


def rounding(orders: np.ndarray) -> np.ndarray:
    """What (α − 1) D_α, the logarithm of a sum, may be off by in double precision.

    Terms are made of log-gamma functions, of up to 6 α for the orders that are asked for, and a
    series ends where they are e^-30 of the sum. Where less is sampled in more noise than that
    shows, divergences would be 0 or negative, which dp_accounting prices with an epsilon of 0.
    """
    return 4e-15 * (np.asarray(orders, float) + 8.0) + 2.0 * math.exp(_SERIES_TOLERANCE)


_SERIES_LENGTH = 1000
_SERIES_TOLERANCE = -30.0


def summable(q: float, sigma: float, orders: np.ndarray) -> np.ndarray:
    """At which orders dp_accounting sums the divergence of a sampled Gaussian, (orders,) of bool.

    At whole numbers the sum is finite. At others there are two infinite ones (section 3.3 of
    arXiv 1908.10530), whose terms fall as slowly as i^(-order - 2) where q is far from 0 or sigma
    is small; dp_accounting takes 1000 terms, and gives up unless one of both is below e^-30 of
    the total. The terms are the same as there.
    """
    whole = orders == np.floor(orders)
    if not 0 < q < 1 or sigma == 0:
        return np.ones_like(whole)
    alpha, i = orders[~whole, None], np.arange(_SERIES_LENGTH)
    j = alpha - i
    log_q, log_rest = math.log(q), math.log1p(-q)
    log_coefficient = (
        special.gammaln(alpha + 1) - special.gammaln(i + 1) - special.gammaln(alpha - i + 1)
    )
    z0 = sigma**2 * (log_rest - log_q) + 0.5
    terms = [
        log_coefficient
        + a * log_q
        + b * log_rest
        + (a * a - a) / (2 * sigma**2)
        + special.log_ndtr(sign * (z0 - a) / sigma)
        for a, b, sign in ((i, j, 1), (j, i, -1))
    ]
    totals = np.logaddexp(*(np.logaddexp.accumulate(term, axis=1) for term in terms))
    falling = [term[:, 1:] < term[:, :-1] for term in terms]
    # A little more than is asked for, so that rounding does not tell the two apart.
    small = np.maximum(*terms) < totals + _SERIES_TOLERANCE - 1e-6
    result = whole.copy()
    result[~whole] = (falling[0] & falling[1] & small[:, 1:]).any(axis=1)
    return result
