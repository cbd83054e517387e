"""Privacy loss of one Gaussian release, built once for all numbers of steps."""

import functools

import dp_accounting as dpa
from dp_accounting import DpEvent as Event
from dp_accounting.pld import privacy_loss_distribution

from dpoptax._pricing import curves


# Keeps only two, since a fine one takes up to about ten megabytes.
@functools.lru_cache(maxsize=2)
def loss_of(
    event: Event, relation: dpa.NeighboringRelation, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss of one Gaussian release, for composition.

    Building it is most of the cost of a price. A curve or a budget needs it for many step counts.
    """
    common = {"value_discretization_interval": interval, "neighboring_relation": relation}
    if isinstance(event, dpa.GaussianDpEvent):
        return privacy_loss_distribution.from_gaussian_mechanism(event.noise_multiplier, **common)
    if isinstance(event, dpa.PoissonSampledDpEvent):
        return privacy_loss_distribution.from_gaussian_mechanism(
            standard_deviation=event.event.noise_multiplier,
            sampling_prob=event.sampling_probability,
            **common,
        )
    if isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return _without_replacement(event, relation, interval)
    if hasattr(event, "pair"):  # the event computes its own losses
        return event.pair(relation, interval)
    return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=event.dataset_size,
        sampling_probability=event.sampling_probability,
        truncated_batch_size=event.truncated_batch_size,
        noise_multiplier=event.noise_multiplier,
        **common,
    )


def _without_replacement(
    event: dpa.SampledWithoutReplacementDpEvent, relation: dpa.NeighboringRelation, interval: float
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns the privacy loss of a Gaussian release of B of N records.

    With q = B/N and e^ε' = 1 + q (e^ε − 1), δ'(ε') = q δ(ε) for ε ≥ 0, with δ that of two sums at a
    distance of 2C (Balle, Barthe, Gaboardi, 2018, theorem 9; proof in docs/developers/pricing.md).
    These are the positive losses of the sampled Gaussian when a record is removed. Under
    replace-one, the bound holds in both directions, so the negative losses mirror them.
    """
    removed = privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=event.event.noise_multiplier / 2,
        sampling_prob=min(1.0, event.sample_size / event.source_dataset_size),
        value_discretization_interval=interval,
    )
    if relation is dpa.NeighboringRelation.ADD_OR_REMOVE_ONE:
        return removed
    return curves.symmetric(removed._pmf_remove.to_dense_pmf(), interval)


def is_without_replacement(event: Event) -> bool:
    """Returns whether it is a Gaussian on a sample without replacement, with finite loss."""
    if not isinstance(event, dpa.SampledWithoutReplacementDpEvent):
        return False
    inner = event.event
    gaussian = isinstance(inner, dpa.GaussianDpEvent) and inner.noise_multiplier > 0
    return gaussian and event.sample_size > 0


def is_sampled_gaussian(event: Event) -> bool:
    """Returns whether it is a sampled Gaussian with a finite, positive privacy loss."""
    if isinstance(event, dpa.TruncatedSubsampledGaussianDpEvent):
        sizes = event.dataset_size, event.truncated_batch_size, event.noise_multiplier
        return event.sampling_probability > 0 and all(size > 0 for size in sizes)
    if not isinstance(event, dpa.PoissonSampledDpEvent):
        return False
    inner = event.event
    gaussian = isinstance(inner, dpa.GaussianDpEvent) and inner.noise_multiplier > 0
    return gaussian and event.sampling_probability > 0
