"""Privacy loss distributions of one sampled Gaussian: dp_accounting's, a grid at a time."""

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import dp_accounting as dpa
import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy import stats

Adjacency: TypeAlias = privacy_loss_mechanism.AdjacencyType


def is_sampled_gaussian(event: dpa.DpEvent) -> bool:
    """Whether `sampled_gaussian_pld` knows the event."""
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        sizes = event.truncated_batch_size > 0 and event.dataset_size > 0
        return sizes and _in_range(event.sampling_probability, event.noise_multiplier)
    return (
        isinstance(event, dpa.PoissonSampledDpEvent)
        and isinstance(event.event, dpa.GaussianDpEvent)
        and _in_range(event.sampling_probability, event.event.noise_multiplier)
    )


def sampled_gaussian_pld(
    event: dpa.DpEvent, relation: dpa.NeighboringRelation, interval: float
) -> PrivacyLossDistribution:
    """The privacy loss distribution of one noisy sum over a sample.

    That of dp_accounting's `from_gaussian_mechanism` and `from_truncated_subsampled_gaussian_
    mechanism`, number by number: it inverts the privacy loss at each point of a grid, in a loop
    that is most of the accounting's time, and here the same operations are on arrays. What a
    truncated event and the same one without truncation share is computed once.
    """
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return _gaussian_pld(
            event.event.noise_multiplier, event.sampling_probability, relation, interval
        )
    size, q, sigma = event.truncated_batch_size, event.sampling_probability, event.noise_multiplier
    added = _gaussian_pld(sigma, q, relation, interval)
    truncation = stats.binom.sf(size - 1, event.dataset_size - 1, q)
    if truncation == 0.0:
        return added
    # Who is in a draw that is cut replaces another record.
    in_cut = stats.binom.sf(size, event.dataset_size, q) * size / truncation / event.dataset_size
    replaced = _gaussian_pld(sigma / 2, in_cut, dpa.NeighboringRelation.REPLACE_ONE, interval)
    return replaced.compute_mixture(added, truncation)


def _in_range(probability: float, noise_multiplier: float) -> bool:
    return probability > 0 and noise_multiplier > 0


@functools.lru_cache(maxsize=8)
def _gaussian_pld(
    sigma: float, probability: float, relation: dpa.NeighboringRelation, interval: float
) -> PrivacyLossDistribution:
    def pmf(adjacency: Adjacency) -> pld_pmf.PLDPmf:
        loss = _GaussianLoss(sigma, sampling_prob=probability, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        low = math.floor(bounds.epsilon_lower / interval)
        high = math.ceil(bounds.epsilon_upper / interval)
        deltas = loss.get_delta_for_epsilon(np.arange(low, high + 1) * interval)
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)

    if relation is dpa.NeighboringRelation.REPLACE_ONE:
        return PrivacyLossDistribution(pmf(Adjacency.REPLACE))
    if probability == 1:
        return PrivacyLossDistribution(pmf(Adjacency.REMOVE))
    return PrivacyLossDistribution(pmf(Adjacency.REMOVE), pmf(Adjacency.ADD))


class _GaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):
    """dp_accounting's, whose `get_delta_for_epsilon` inverts the loss of an array at once."""

    def get_delta_for_epsilon(self, epsilon: np.ndarray) -> np.ndarray:
        q, kind = self.sampling_prob, self.adjacency_type
        if q == 1.0:
            return np.asarray(super().get_delta_for_epsilon(epsilon))
        deltas = np.zeros_like(epsilon)
        inverted = np.ones_like(epsilon, dtype=bool)
        if kind == Adjacency.ADD:
            inverted = epsilon < -math.log1p(-q)
        elif kind == Adjacency.REMOVE:
            inverted = epsilon > math.log1p(-q)
            deltas[~inverted] = -np.expm1(epsilon[~inverted])
        losses = epsilon[inverted]
        inverse = {
            Adjacency.ADD: self._inverse_add,
            Adjacency.REMOVE: self._inverse_remove,
            Adjacency.REPLACE: self._inverse_replace,
        }[kind]
        cuts = inverse(losses)
        deltas[inverted] = self.mu_upper_cdf(cuts) - np.exp(losses + self.mu_lower_log_cdf(cuts))
        return np.clip(deltas, 0, 1)

    def _inverse_add(self, losses: np.ndarray) -> np.ndarray:
        return self.sensitivity + self._without_sampling(-self._before_sampling(-losses))

    def _inverse_remove(self, losses: np.ndarray) -> np.ndarray:
        return self._without_sampling(self._before_sampling(losses))

    def _without_sampling(self, losses: np.ndarray) -> np.ndarray:
        width = self._standard_deviation**2
        return -0.5 * self.sensitivity - losses * width / self.sensitivity

    def _before_sampling(self, losses: np.ndarray) -> np.ndarray:
        """log(1 + (e^loss - 1)/q); minus infinity next to log(1 - q)."""
        a, c = 1 / self.sampling_prob, 1 - 1 / self.sampling_prob
        least = math.log(1 - self.sampling_prob)
        ends = np.abs(losses - least) <= 1e-9 * np.maximum(np.abs(losses), abs(least))
        large, small = losses + np.log(a), np.log(-c)
        if np.any((small >= large) & ~ends):
            raise ValueError(f"privacy losses below log(1 - q)={least} have no inverse")
        with np.errstate(divide="ignore", invalid="ignore"):
            found = large + np.log1p(-np.exp(small - large))
        found = np.where(losses == 0, np.log(a + c), found)
        return np.where(ends, -math.inf, found)

    def _inverse_replace(self, losses: np.ndarray) -> np.ndarray:
        sigma, q = self._standard_deviation, self.sampling_prob
        sizes, places = np.unique(np.abs(losses), return_inverse=True)
        signs = np.where(losses >= 0, 1.0, -1.0)
        log_alpha = 0.5 * (self.sensitivity / sigma) ** 2 + math.log1p(-q) - math.log(q)
        halves = sizes / 2
        halves = np.where(halves == 0, 1.0, halves)  # a loss of 0 is treated apart, below
        log_sinh = halves + _each(math.log1p, -_each(math.exp, -2 * halves)) - math.log(2)
        height = log_alpha + log_sinh[places]
        asinh = -signs * np.logaddexp(0.5 * np.logaddexp(0, 2 * height), height)
        found = sigma**2 / self.sensitivity * (asinh - losses / 2)
        return np.where(losses == 0, 0.0, found)


def _each(function: Callable[[float], float], values: np.ndarray) -> np.ndarray:
    """`function` of each, to the last bit as the platform's library has it; NumPy has its own."""
    return np.fromiter(map(function, values.tolist()), float, len(values))
