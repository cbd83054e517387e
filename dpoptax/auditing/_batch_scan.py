"""Reads a sequence of batches once, and counts the events that a law of batches predicts."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpoptax.auditing._batch_laws import NO_POOL, BatchLaw, Count, Marked

Integers = NDArray[np.int64]


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

    @property
    def number(self) -> int:
        """The number of groups."""
        return len(self.labels)

    def part(self, low: int, high: int) -> str:
        """Names the groups low, …, high − 1."""
        return f"groups {', '.join(self.labels[low:high])}"


class Tally(NamedTuple):
    """Members and drawn records of each group, in one pool of one step."""

    members: Integers
    drawn: Integers


class Match(NamedTuple):
    """The most records that a batch shares with one earlier batch, among those last seen there.

    Attributes:
      found: their number.
      earlier: the step of that batch.
      step: the step.
      pool: the records of the pool.
      largest: the size of the largest earlier batch.
      drawn: the records that the step draws from the pool.
    """

    found: int
    earlier: int
    step: int
    pool: int
    largest: int
    drawn: int


@dataclasses.dataclass
class Scan:
    """Holds the counts of a sequence of batches.

    Attributes:
      steps: the number of steps.
      pools: the number of pools.
      impossible: sentences, each about batches that the law cannot draw.
      counts: for each pool, the numbers drawn in each step.
      shared: for each set of records, how many of it each step drew.
      matches: the greatest match of each batch with an earlier one.
      tallies: for each partition, the numbers of each step and pool.
    """

    steps: int
    pools: int
    impossible: list[str] = dataclasses.field(default_factory=list)
    counts: dict[int, list[Count]] = dataclasses.field(default_factory=dict)
    shared: dict[str, list[Marked]] = dataclasses.field(default_factory=dict)
    matches: list[Match] = dataclasses.field(default_factory=list)
    tallies: dict[str, list[Tally]] = dataclasses.field(default_factory=dict)


def scan_batches(
    batches: Sequence[Integers], law: BatchLaw, window: int, partitions: Sequence[Partition]
) -> Scan:
    """Counts pools, overlaps and groups of each step, for a law.

    If a batch is impossible under a law whose pools change, its steps after it are not read.

    Args:
      batches: the rows of each step.
      law: a new law, before its first step.
      window: the number of steps of the set "recently drawn".
      partitions: groups of records.
    """
    scan = Scan(len(batches), law.pools)
    history, largest = _History(law.size, window), 0
    sizes = None
    for step, rows in enumerate(batches):
        labels = law.labels(step)
        if sizes is None or not law.fixed:
            pools = [np.flatnonzero(labels == pool) for pool in range(law.pools)]
            sizes = [_by_group(partitions, members) for members in pools]
        members = np.array([len(pool) for pool in pools])
        found = labels[rows]
        drawn = np.bincount(found[found >= 0], minlength=law.pools)
        forbidden = int(np.count_nonzero(found <= NO_POOL))
        if _impossible(scan, step, law, members, drawn, forbidden) and not law.fixed:
            break
        parts = [rows[found == pool] for pool in range(law.pools)]
        _count_shared(scan, history, labels, parts, members, step)
        scan.shared.setdefault(KNOWN, []).extend(
            each for each in law.shares(members, drawn) if 0 < each.marked < each.pool > each.drawn
        )
        _count_matches(scan, history, parts, members, step, largest)
        for part, tallied in zip(parts, sizes, strict=True):
            for partition, each in zip(partitions, tallied, strict=True):
                tally = Tally(each, _tally(partition, part))
                scan.tallies.setdefault(partition.name, []).append(tally)
        law.advance(step, rows)
        history.add(step, rows)
        largest = max(largest, len(rows))
    return scan


class _History:
    """The last step in which each record was drawn."""

    def __init__(self, size: int, window: int) -> None:
        self.last = np.full(size, -1)
        self._window = window

    def add(self, step: int, rows: Integers) -> None:
        self.last[rows] = step

    def sets(self, step: int) -> dict[str, NDArray[np.bool_]]:
        """Returns sets of records that are known before the step, each (N,)."""
        sets = {NEW: self.last < 0}
        if step:
            sets[PREVIOUS] = self.last == step - 1
            sets[RECENT] = self.last >= max(0, step - self._window)
        return sets


NEW = "first draws of a record"
PREVIOUS = "repeats from the batch before"
RECENT = "repeats from the last N/B steps"
KNOWN = "draws of records known in the group"


def _impossible(
    scan: Scan, step: int, law: BatchLaw, members: Integers, drawn: Integers, forbidden: int
) -> bool:
    """Takes note of the counts of a step; returns whether the law excludes them."""
    before = len(scan.impossible)
    if forbidden:
        scan.impossible.append(f"step {step} draws {forbidden} records that must rest")
    for pool, count in enumerate(law.counts(step, members, drawn)):
        certain = count.probability in (0.0, 1.0)
        if count.found > count.most or (certain and count.found != count.most * count.probability):
            expected = "" if certain else "at most "
            scan.impossible.append(
                f"step {step} draws {count.found} records instead of {expected}{count.most}"
            )
        elif not certain and count.trials:
            scan.counts.setdefault(pool, []).append(count)
    return len(scan.impossible) > before


def _count_shared(
    scan: Scan,
    history: _History,
    labels: Integers,
    parts: Sequence[Integers],
    members: Integers,
    step: int,
) -> None:
    for name, chosen in history.sets(step).items():
        for pool, part in enumerate(parts):
            if 0 < len(part) < members[pool]:
                marked = int(np.count_nonzero(chosen & (labels == pool)))
                if 0 < marked < members[pool]:
                    found = int(np.count_nonzero(chosen[part]))
                    each = Marked(found, int(members[pool]), marked, len(part))
                    scan.shared.setdefault(name, []).append(each)


def _count_matches(
    scan: Scan,
    history: _History,
    parts: Sequence[Integers],
    members: Integers,
    step: int,
    largest: int,
) -> None:
    for pool, part in enumerate(parts):
        last = history.last[part]
        steps, counts = np.unique(last[last >= 0], return_counts=True)
        if len(counts):
            best = int(np.argmax(counts))
            scan.matches.append(
                Match(
                    int(counts[best]),
                    int(steps[best]),
                    step,
                    int(members[pool]),
                    min(largest, int(members[pool])),
                    len(part),
                )
            )


def _tally(partition: Partition, rows: Integers) -> Integers:
    return np.bincount(partition.groups[rows], minlength=partition.number)


def _by_group(partitions: Sequence[Partition], rows: Integers) -> list[Integers]:
    return [_tally(partition, rows) for partition in partitions]
