"""Reads a sequence of batches once, and tests the counts that a law of batches predicts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from dpoptax.auditing._batch_laws import NO_POOL, Count, Draw, Law, Marked
from dpoptax.auditing._exact_scores import (
    FALSE_ALARM,
    Array,
    Finding,
    Integers,
    binomial_scores,
    extremes_p_value,
    hypergeometric_scores,
    mean_p_value,
    spread_p_value,
)

NEW = "first draws of a record"
PREVIOUS = "repeats from the batch before"
RECENT = "repeats from the last N/B steps"
KNOWN = "draws of records known in the group"


class Partition(NamedTuple):
    """Groups of records, named by a number for each record.

    Attributes:
      name: the kind of groups.
      groups: (N,), in [0, len(labels)).
      labels: the name of each group.
    """

    name: str
    groups: Integers
    labels: tuple[str, ...]

    def tally(self, rows: Integers) -> Integers:
        """Counts the rows of each group."""
        return np.bincount(self.groups[rows], minlength=len(self.labels))


def tests_under(
    law: Law,
    batches: Sequence[Integers],
    window: int,
    partitions: Sequence[Partition],
    rng: np.random.Generator,
) -> tuple[list[str], list[Finding]]:
    """Returns sentences about batches that a law cannot draw, and the tests of the others.

    There are as many tests for any batches. If a batch is impossible under a law whose pools
    change, the steps after it are not read.

    Args:
      law: a new law, before its first step.
      batches: the rows of each step.
      window: the number of steps of the set "recently drawn".
      partitions: groups of records.
      rng: randomizes scores.
    """
    now = next(law)
    scan = _Scan(len(now.labels), window, partitions)
    for step, rows in enumerate(batches):
        scan.read(step, rows, now)
        before, now = now, law.send(rows)
        if scan.impossible and now.labels is not before.labels:
            break
    return scan.impossible, scan.tests(rng)


class _Scan:
    """Counts pools, overlaps and groups of each step.

    All counts are kept, also those that could have one value only: their number must not depend on
    the batches. It would be a stopping time, for example the step in which the last record is
    drawn, and the mean of the scores would not be normal.
    """

    def __init__(self, size: int, window: int, partitions: Sequence[Partition]) -> None:
        self.impossible: list[str] = []
        self._window, self._partitions = window, partitions
        self._labels: Integers | None = None
        self._pools: list[Integers] = []
        self._members: list[list[Integers]] = []
        self._last = np.full(size, -2)  # the step that drew each record last
        self._largest = 0
        self._sizes: list[list[Count]] = []
        self._marked: dict[str, list[Marked]] = {PREVIOUS: [], RECENT: [], NEW: [], KNOWN: []}
        # How many records a batch shares with one earlier batch, at most, among those last drawn
        # there; the step of that one, and its own; the sizes of the pool, of the largest earlier
        # batch, and of the part of the batch from the pool.
        self._matches: list[tuple[int, ...]] = []
        self._drawn: list[list[tuple[Integers, Integers]]] = [[] for _ in partitions]

    def read(self, step: int, rows: Integers, law: Draw) -> None:
        """Counts the batch of a step."""
        labels = law.labels
        if labels is not self._labels:
            self._labels = labels
            self._pools = [np.flatnonzero(labels == pool) for pool in range(len(law.rates))]
            self._members = [[each.tally(x) for each in self._partitions] for x in self._pools]
        parts = [rows[labels[rows] == pool] for pool in range(len(law.rates))]
        sizes, drawn = (np.array([len(x) for x in each]) for each in (self._pools, parts))
        if resting := int(np.count_nonzero(labels[rows] <= NO_POOL)):
            self.impossible.append(f"step {step} draws {resting} records that must rest")
        self._sizes.append(law.counts(sizes, drawn))
        self.impossible += [
            f"step {step} draws {count.found} records instead of "
            f"{'' if count.certain else 'at most '}{count.most}"
            for count in self._sizes[-1]
            if not count.possible
        ]
        self._marked[KNOWN] += law.shares(sizes, drawn)
        last = self._last
        recent = last >= max(0, step - self._window)
        # Sets of records that are known before the step, each (N,).
        known = {NEW: last < 0, PREVIOUS: last == step - 1, RECENT: recent}
        for name, chosen in known.items():
            for pool, part in zip(self._pools, parts, strict=True):
                counts = chosen[part].sum(), len(pool), chosen[pool].sum(), len(part)
                self._marked[name].append(Marked(*map(int, counts)))
        for pool, part, members in zip(self._pools, parts, self._members, strict=True):
            self._add_match(step, len(pool), part)
            for of, partition, each in zip(self._drawn, self._partitions, members, strict=True):
                of.append((each, partition.tally(part)))
        self._last[rows] = step
        self._largest = max(self._largest, len(rows))

    def _add_match(self, step: int, pool: int, part: Integers) -> None:
        last = self._last[part]
        steps, counts = np.unique(last[last >= 0], return_counts=True)
        if len(counts):
            best = int(np.argmax(counts))
            sizes = pool, min(self._largest, pool), len(part)
            self._matches.append((int(counts[best]), int(steps[best]), step, *sizes))

    def tests(self, rng: np.random.Generator) -> list[Finding]:
        """Returns all tests."""
        found = _sizes(self._sizes, rng)
        for name, marked in self._marked.items():
            p_value, seen, _ = _tested(np.array(marked, np.int64).reshape(-1, 4).T, rng)
            found.append(Finding(name, p_value, seen))
        found.append(_repeated(self._matches, len(self._sizes) * len(self._pools)))
        for partition, drawn in zip(self._partitions, self._drawn, strict=True):
            members, counts = (np.stack(each) for each in zip(*drawn, strict=True))
            found += _groups(partition, members, counts, rng)
        return found


def _sizes(steps: Sequence[Sequence[Count]], rng: np.random.Generator) -> list[Finding]:
    """Tests the mean size in each pool, and the spread and the extremes over all pools."""
    found, trials, rates, most = np.moveaxis(np.array(steps, float), -1, 0)
    found, trials, most = (each.astype(np.int64) for each in (found, trials, most))
    scores = binomial_scores(np.minimum(found, most), trials, rates, most, rng)
    if all(count.certain for step in steps for count in step):
        scores = scores[:0]
    p_values = [mean_p_value(each) for each in scores.T]
    best = int(np.argmin(p_values))
    p_value = min(1.0, p_values[best] * len(p_values))
    seen, expected = found[:, best].mean(), (trials * rates)[:, best].mean()
    mean = f"{seen:,.4g} records in a batch, {expected:,.4g} expected"
    ratio, together = _spread(scores), scores.ravel()
    spread = f"{ratio:.2g} times as wide as expected"
    ends = f"from {found.min():,} to {found.max():,}"
    return [
        Finding("mean size", p_value, mean),
        Finding("spread of sizes", spread_p_value(together), spread),
        Finding("extreme sizes", extremes_p_value(together), ends),
    ]


def _tested(marked: Integers, rng: np.random.Generator) -> tuple[float, str, Array]:
    """Tests the draws of marked records, (4, counts): p-value, text and scores."""
    found, pool, known, drawn = marked
    scores = hypergeometric_scores(found, pool, known, drawn, rng)
    if not np.any((known > 0) & (known < pool) & (drawn > 0) & (drawn < pool)):
        scores = scores[:0]  # no count is random
    expected = float((drawn * known / np.maximum(pool, 1)).sum())
    seen = f"{found.sum():,} draws, {expected:,.0f} expected"
    return mean_p_value(scores), seen, scores


def _repeated(matches: Sequence[tuple[int, ...]], number: int) -> Finding:
    """Tests the greatest match of each batch with an earlier one."""
    name = "repeated batches"
    if not matches:
        return Finding(name, 1.0, "none")
    found, earlier, step, pool, largest, drawn = np.array(matches).T
    p_values = np.minimum(1.0, step * stats.hypergeom.sf(found - 1, pool, largest, drawn))
    p_value = min(1.0, number * float(p_values.min()))
    best = int(np.argmin(p_values))
    significant = p_values * number < FALSE_ALARM
    seen = f"step {step[best]:,} shares {found[best]:,} of {drawn[best]:,} with {earlier[best]:,}"
    if significant.sum() > 1:
        lag = np.argmax(np.bincount((step - earlier)[significant]))
        seen += (
            f"; {significant.sum():,} batches repeat records of one before, "
            f"most often {lag:,} steps before"
        )
    return Finding(name, p_value, seen)


def _groups(
    partition: Partition, members: Integers, drawn: Integers, rng: np.random.Generator
) -> list[Finding]:
    """Tests the rates of groups, and their spread over batches; both are (counts, groups).

    The groups are halved again and again. Given the draws from a range of groups, those from its
    first half are hypergeometric, and independent for all halvings.
    """
    rates, mixes = [], []
    for low, middle, high in _halvings(0, len(partition.labels)):
        ends = (drawn, middle), (members, high), (members, middle), (drawn, high)
        marked = np.stack([of[:, low:end].sum(axis=1) for of, end in ends])
        p_value, seen, scores = _tested(marked, rng)
        name = f"groups {', '.join(partition.labels[low:middle])}"
        rates.append((p_value, f"{name}: {seen}"))
        text = f"the share of {name} spreads {_spread(scores):.2g} times as wide as expected"
        mixes.append((spread_p_value(scores), text))
    found = []
    for kind, parts in (("rates", rates), ("mix", mixes)):
        p_value, text = min(parts)
        p_value = min(1.0, p_value * len(parts))
        found.append(Finding(f"{kind} by {partition.name}", p_value, text))
    return found


def _spread(scores: Array) -> float:
    return float(np.sqrt(np.mean(scores**2))) if len(scores) else 1.0


def _halvings(low: int, high: int) -> list[tuple[int, int, int]]:
    middle = (low + high) // 2
    if middle == low:
        return []
    return [(low, middle, high), *_halvings(low, middle), *_halvings(middle, high)]
