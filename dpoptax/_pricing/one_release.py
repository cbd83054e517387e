"""Privacy loss of one Gaussian release, built once for all numbers of steps."""

import functools

import dp_accounting as dpa
from dp_accounting import DpEvent as Event
from dp_accounting.pld import privacy_loss_distribution


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
    return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
        dataset_size=event.dataset_size,
        sampling_probability=event.sampling_probability,
        truncated_batch_size=event.truncated_batch_size,
        noise_multiplier=event.noise_multiplier,
        **common,
    )


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
