"""Tests of scanned batches: few, each with an exact or conservative p-value."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpoptax.auditing._batch_laws import Marked
from dpoptax.auditing._batch_scan import KNOWN, NEW, PREVIOUS, RECENT, Match, Partition, Scan, Tally
from dpoptax.auditing._exact_scores import (
    binomial_scores,
    extremes_p_value,
    hypergeometric_scores,
    hypergeometric_tails,
    mean_p_value,
    padded,
    spread_p_value,
)
from dpoptax.auditing._findings import FALSE_ALARM, Finding

Array = NDArray[np.float64]


def findings_of(
    scan: Scan, partitions: Sequence[Partition], rng: np.random.Generator
) -> list[Finding]:
    """Returns all tests, always the same number for the same partitions."""
    found = _sizes(scan, rng)
    number = scan.steps * scan.pools
    for name in (PREVIOUS, RECENT, NEW, KNOWN):
        found.append(_shared(name, scan.shared.get(name, []), number, rng))
    found.append(_repeated(scan.matches, number))
    for partition in partitions:
        found += _groups(partition, scan.tallies.get(partition.name, []), rng)
    return found


def _sizes(scan: Scan, rng: np.random.Generator) -> list[Finding]:
    """Tests the mean size in each pool, and the spread and the extremes over all pools."""
    counts, scores, means = scan.counts, [], []
    for each in counts.values():
        found, trials, rates, most = (np.array(column) for column in zip(*each, strict=True))
        random = binomial_scores(found, trials, rates, most, rng)
        scores.append(padded(random, scan.steps, rng))
        means.append((mean_p_value(scores[-1]), found.mean(), (trials * rates).mean()))
    together = np.zeros(0)
    if scores:
        together = padded(np.concatenate(scores), scan.steps * scan.pools, rng)
    sizes = [count.found for each in counts.values() for count in each]
    p_value, seen, expected = min(means, default=(1.0, 1.0, 1.0))
    mean = f"{seen:,.4g} records in a batch, {expected:,.4g} expected"
    ends = f"from {min(sizes, default=0):,} to {max(sizes, default=0):,}"
    ratio = _spread(together)
    spread = f"{ratio:.2g} times as wide as expected"
    return [
        Finding("mean size", min(1.0, p_value * scan.pools), float(seen / expected), mean),
        Finding("spread of sizes", spread_p_value(together), ratio, spread),
        Finding("extreme sizes", extremes_p_value(together), 1.0, ends),
    ]


def _shared(name: str, marked: Sequence[Marked], number: int, rng: np.random.Generator) -> Finding:
    if not marked:
        return Finding(name, 1.0, 1.0, "none")
    found, pool, chosen, drawn = (np.array(column) for column in zip(*marked, strict=True))
    scores = hypergeometric_scores(found, pool, chosen, drawn, rng)
    p_value = mean_p_value(padded(scores, number, rng))
    expected = (drawn * chosen / pool).sum()
    seen = f"{found.sum():,} draws, {expected:,.0f} expected"
    return Finding(name, p_value, float(found.sum() / expected), seen)


def _repeated(matches: Sequence[Match], number: int) -> Finding:
    """Tests the greatest match of each batch with an earlier one."""
    name = "repeated batches"
    if not matches:
        return Finding(name, 1.0, 1.0, "none")
    found, earlier, step, pool, largest, drawn = (
        np.array(column) for column in zip(*matches, strict=True)
    )
    above, equal, _ = hypergeometric_tails(found, pool, largest, drawn)
    p_values = np.minimum(1.0, step * (above + equal))
    p_value = min(1.0, number * float(p_values.min()))
    best = int(np.argmin(p_values))
    significant = p_values * number < FALSE_ALARM
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
        scores = padded(hypergeometric_scores(*counts, rng), len(members), rng)
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
