"""Tests of scanned batches: few, each with an exact or conservative p-value."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpoptax.auditing._batch_laws import Count, Marked
from dpoptax.auditing._batch_scan import KNOWN, NEW, PREVIOUS, RECENT, Match, Partition, Scan, Tally
from dpoptax.auditing._exact_scores import (
    binomial_scores,
    extremes_p_value,
    hypergeometric_scores,
    hypergeometric_tails,
    mean_p_value,
    spread_p_value,
)
from dpoptax.auditing._findings import FALSE_ALARM, Finding

Array = NDArray[np.float64]

# Scores are randomized by a stream that no loader draws from.
_STREAM = (0x62617463, 0x68657321)


def tests_of(scan: Scan, partitions: Sequence[Partition]) -> list[Finding]:
    """Returns all tests, always the same number for the same partitions."""
    rng = np.random.default_rng(np.random.SeedSequence(_STREAM))
    found = _sizes(scan.counts, rng)
    found += [_shared(name, scan.shared.get(name, []), rng) for name in (PREVIOUS, RECENT)]
    found += [_shared(name, scan.shared.get(name, []), rng) for name in (NEW, KNOWN)]
    found.append(_repeated(scan.matches))
    for partition in partitions:
        found += _groups(partition, scan.tallies.get(partition.name, []), rng)
    return found


def _sizes(counts: dict[int, list[Count]], rng: np.random.Generator) -> list[Finding]:
    """Tests the mean size in each pool, and the spread and the extremes over all pools."""
    scores, means = [], []
    for each in counts.values():
        found, trials, rates, most = (np.array(column) for column in zip(*each, strict=True))
        scores.append(binomial_scores(found, trials, rates, most, rng))
        means.append((mean_p_value(scores[-1]), found.mean(), (trials * rates).mean()))
    together = np.concatenate(scores) if scores else np.zeros(0)
    sizes = [count.found for each in counts.values() for count in each]
    p_value, seen, expected = min(means, default=(1.0, 1.0, 1.0))
    mean = f"{seen:,.4g} records in a batch, {expected:,.4g} expected"
    ends = f"from {min(sizes, default=0):,} to {max(sizes, default=0):,}"
    ratio = _spread(together)
    spread = f"{ratio:.2g} times as wide as expected"
    return [
        Finding("mean size", min(1.0, p_value * max(1, len(means))), float(seen / expected), mean),
        Finding("spread of sizes", spread_p_value(together), ratio, spread),
        Finding("extreme sizes", extremes_p_value(together), 1.0, ends),
    ]


def _shared(name: str, marked: Sequence[Marked], rng: np.random.Generator) -> Finding:
    if not marked:
        return Finding(name, 1.0, 1.0, "none")
    found, pool, chosen, drawn = (np.array(column) for column in zip(*marked, strict=True))
    p_value = mean_p_value(hypergeometric_scores(found, pool, chosen, drawn, rng))
    expected = (drawn * chosen / pool).sum()
    seen = f"{found.sum():,} draws, {expected:,.0f} expected"
    return Finding(name, p_value, float(found.sum() / expected), seen)


def _repeated(matches: Sequence[Match]) -> Finding:
    """Tests the greatest match of each batch with an earlier one."""
    name = "repeated batches"
    if not matches:
        return Finding(name, 1.0, 1.0, "none")
    found, earlier, step, pool, largest, drawn = (
        np.array(column) for column in zip(*matches, strict=True)
    )
    above, equal, _ = hypergeometric_tails(found, pool, largest, drawn)
    p_values = np.minimum(1.0, step * (above + equal))
    p_value = min(1.0, len(matches) * float(p_values.min()))
    best = int(np.argmin(p_values))
    significant = p_values * len(matches) < FALSE_ALARM
    lags = np.bincount((step - earlier)[significant]) if significant.any() else np.zeros(1)
    seen = f"step {step[best]:,} shares {found[best]:,} of {drawn[best]:,} with {earlier[best]:,}"
    if significant.sum() > 1:
        seen += (
            f"; {significant.sum():,} batches repeat records of one before, "
            f"most often {np.argmax(lags):,} steps before"
        )
    expected = drawn[best] * largest[best] / pool[best]
    return Finding(name, p_value, float(found[best] / expected), seen)


def _groups(
    partition: Partition, tallies: Sequence[Tally], rng: np.random.Generator
) -> list[Finding]:
    """Tests the rates of groups, and their spread over batches.

    The groups are halved again and again. Given the draws from a range of groups, those from its
    first half are hypergeometric, and independent for all halvings.
    """
    means, spreads = [], []
    members, drawn = _stacked(tallies, partition.number)
    for low, middle, high in _halvings(0, partition.number):
        marked, pool = members[:, low:middle].sum(axis=1), members[:, low:high].sum(axis=1)
        found, among = drawn[:, low:middle].sum(axis=1), drawn[:, low:high].sum(axis=1)
        random = (marked > 0) & (marked < pool) & (among > 0) & (among < pool)
        counts = found[random], pool[random], marked[random], among[random]
        scores = hypergeometric_scores(*counts, rng)
        name = partition.part(low, middle)
        means.append(_rate(name, counts, scores))
        ratio = _spread(scores)
        text = f"the share of {name} spreads {ratio:.2g} times as wide as expected"
        spreads.append((spread_p_value(scores), ratio, text))
    found = []
    for name, parts in (("rates", means), ("mix", spreads)):
        p_value, effect, text = min(parts)
        p_value = min(1.0, p_value * len(parts))
        found.append(Finding(f"{name} by {partition.name}", p_value, effect, text))
    return found


def _rate(
    name: str, counts: tuple[NDArray[np.int64], ...], scores: Array
) -> tuple[float, float, str]:
    """Returns the p-value, effect and text of the number of draws from a group."""
    found, pool, marked, among = counts
    expected = (among * marked / pool).sum()
    text = f"{found.sum():,} draws of {name}, {expected:,.0f} expected"
    return mean_p_value(scores), float(found.sum() / expected) if expected else 1.0, text


def _spread(scores: Array) -> float:
    return float(np.sqrt(np.mean(scores**2))) if len(scores) else 1.0


def _stacked(tallies: Sequence[Tally], number: int) -> tuple[NDArray[np.int64], ...]:
    if not tallies:
        return np.zeros((0, number), np.int64), np.zeros((0, number), np.int64)
    return tuple(np.stack(column) for column in zip(*tallies, strict=True))


def _halvings(low: int, high: int) -> list[tuple[int, int, int]]:
    middle = (low + high) // 2
    if middle == low:
        return []
    return [(low, middle, high), *_halvings(low, middle), *_halvings(middle, high)]
