"""Privacy losses of a sampled Gaussian, for all points of a grid at once.

With P = (1 − q) N(0, σ²) + q N(−1, σ²) and Q = N(0, σ²), the loss log(P/Q) decreases in x. It is ε
at

  x(ε) = −1/2 − σ² log(1 + (e^ε − 1)/q)    for ε > log(1 − q),

so δ(ε) = P(X ≤ x(ε)) − e^ε Q(X ≤ x(ε)) if a record is removed. If it is added, the loss is
log(Q/P), which mirrors x and ε. These are the formulas of dp_accounting 0.6, which evaluates the
logarithm in a Python loop over ε (`privacy_loss_mechanism.py`, `get_delta_for_epsilon`). The loop
takes most of the time of a price.
"""

import math

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss


def pair_of(multiplier: float, probability: float, interval: float) -> Pair:
    """Returns the losses of a Gaussian of a Poisson sample, if a record is removed or added.

    Args:
      multiplier: σ, the noise over the sensitivity.
      probability: q in (0, 1].
      interval: of the grid of losses.
    """
    if probability == 1:
        return from_gaussian_mechanism(multiplier, value_discretization_interval=interval)
    kinds = AdjacencyType.REMOVE, AdjacencyType.ADD
    return Pair(*(_losses(multiplier, probability, interval, kind) for kind in kinds))


def _losses(
    multiplier: float, probability: float, interval: float, kind: AdjacencyType
) -> pld_pmf.PLDPmf:
    mechanism = GaussianPrivacyLoss(multiplier, sampling_prob=probability, adjacency_type=kind)
    bounds = mechanism.connect_dots_bounds()
    first = math.floor(bounds.epsilon_lower / interval)
    last = math.ceil(bounds.epsilon_upper / interval)
    deltas = _deltas(mechanism, multiplier, interval * np.arange(first, last + 1))
    return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)


def _deltas(mechanism: GaussianPrivacyLoss, multiplier: float, epsilons: np.ndarray) -> np.ndarray:
    """Returns δ(ε) as `mechanism.get_delta_for_epsilon`, in a few operations on arrays."""
    q, is_removed = mechanism.sampling_prob, mechanism.adjacency_type is AdjacencyType.REMOVE
    sign = 1.0 if is_removed else -1.0
    # Of a smaller loss, everything is above it if a record is removed. Nothing is above a larger
    # one if a record is added.
    below = -np.expm1(np.minimum(epsilons, 0.0))
    deltas = below if is_removed else np.zeros(len(epsilons))
    inside = sign * epsilons > math.log1p(-q)
    within = epsilons[inside]
    # log(1 + (e^s − 1)/q) = s − log(q) + log(1 − (1 − q) e^−s), for s = ±ε above log(1 − q)
    exponent = math.log1p(-q) - sign * within
    unsampled = sign * within - math.log(q) + np.log(-np.expm1(exponent))
    x = sign * (-0.5 - multiplier**2 * unsampled)
    above = mechanism.mu_upper_cdf(x) - np.exp(within + mechanism.mu_lower_log_cdf(x))
    deltas[inside] = above
    return np.clip(deltas, 0.0, 1.0)
