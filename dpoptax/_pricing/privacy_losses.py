"""Privacy losses of the parts of a composition, each built once for all numbers of steps."""

import functools
import math

import dp_accounting as dpa
from dp_accounting import DpEvent as Event
from dp_accounting import dp_event, pld
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Pair

from dpoptax import _pricing
from dpoptax._pricing.events import (
    MULTIPLIERS,
    CustomDpEvent,
    GroupDpEvent,
    Parts,
    gaussian_event,
    joint_multiplier,
)

# Covers the rounding of a joint multiplier: four roundings of a few units of 2^-53.
_LESS = 1 - 2.0**-49


def pairs_of(
    parts: Parts, relation: dpa.NeighboringRelation, interval: float
) -> list[tuple[Pair, int]] | None:
    """Returns the pairs of distributions and their counts, or None if a part is not private.

    Gaussian releases without sampling are joined into one.

    Raises:
      dpa.UnsupportedEventError: a part is not supported under the relation.
    """
    pairs: dict[int, tuple[Pair, int]] = {}
    gaussians = []
    for event, count in parts:
        if isinstance(event, dpa.GaussianDpEvent) and event.noise_multiplier > 0:
            gaussians.append(event.noise_multiplier / math.sqrt(count))
            continue
        pair = loss_of(event, relation, interval)
        if pair is None:
            return None
        # Equal events may share a cached pair. Keeping it here keeps its id from being used again.
        pairs[id(pair)] = pair, count + pairs.get(id(pair), (pair, 0))[1]
    found = list(pairs.values())
    if gaussians:
        multiplier = joint_multiplier(gaussians) * (_LESS if len(gaussians) > 1 else 1.0)
        # Less noise than the range of dp_accounting counts as none.
        if min(gaussians) < MULTIPLIERS[0] or multiplier < MULTIPLIERS[0]:
            return None
        joint = loss_of(gaussian_event(multiplier), relation, interval)
        assert joint is not None  # its noise is within the range of dp_accounting
        found.append((joint, 1))
    return found


# Keeps only two, since a fine one takes up to about ten megabytes.
@functools.lru_cache(maxsize=2)
def loss_of(event: Event, relation: dpa.NeighboringRelation, interval: float) -> Pair | None:
    """Returns the privacy loss of one release, for composition, or None if it is not private.

    Building it is most of the cost of a price. A curve or a budget needs it for many step counts.
    """
    common = {"value_discretization_interval": interval, "neighboring_relation": relation}
    from_gaussian = privacy_loss_distribution.from_gaussian_mechanism
    match event:
        # The accountant would convolve sampled releases with a loss of zero, which rounds.
        case dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma)) if q > 0 and sigma > 0:
            return from_gaussian(sigma, sampling_prob=q, **common)
        case dpa.GaussianDpEvent(sigma) if sigma > 0:
            return from_gaussian(sigma, **common)
        case dpa.SampledWithoutReplacementDpEvent(_, size, dpa.GaussianDpEvent(sigma)) if (
            size > 0 and sigma > 0
        ):
            return _without_replacement(event, relation, interval)
        case dpa.TruncatedSubsampledGaussianDpEvent(size, q, cut_to, sigma) if (
            size > 0 and q > 0 and cut_to > 0 and sigma > 0
        ):
            return privacy_loss_distribution.from_truncated_subsampled_gaussian_mechanism(
                dataset_size=size,
                sampling_probability=q,
                truncated_batch_size=cut_to,
                noise_multiplier=sigma,
                **common,
            )
        case dp_event.RepeatAndSelectDpEvent() | GroupDpEvent():
            return _pricing.derived_curves.pair(event, relation, interval)
        case CustomDpEvent():
            return event.pair(relation, interval)
    # Other events, such as sampled releases with a loss of zero or of infinity.
    accountant = pld.PLDAccountant(relation, interval).compose(event)
    return None if accountant._contains_non_dp_event else accountant._pld


def _without_replacement(
    event: dpa.SampledWithoutReplacementDpEvent, relation: dpa.NeighboringRelation, interval: float
) -> Pair:
    """Returns the privacy loss of a Gaussian release of B of N records.

    With q = B/N and e^ε' = 1 + q (e^ε − 1), δ'(ε') = q δ(ε) for ε ≥ 0, with δ that of two sums at a
    distance of 2C (Balle, Barthe, Gaboardi, 2018, theorem 9; proof in docs/developers/pricing.md).
    These are the positive losses of the sampled Gaussian when a record is removed. Under
    replace-one, the bound holds in both directions, so the negative losses mirror them.
    """
    share = min(1.0, event.sample_size / event.source_dataset_size)
    removed = privacy_loss_distribution.from_gaussian_mechanism(
        event.event.noise_multiplier / 2,
        sampling_prob=share,
        value_discretization_interval=interval,
    )
    if relation is dpa.NeighboringRelation.ADD_OR_REMOVE_ONE:
        return removed
    return _pricing.curves.symmetric(removed._pmf_remove.to_dense_pmf(), interval)
