"""Checks whether the batches of any loader are draws of a claimed sampler."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dpoptax.accounting import Guarantee, planned_guarantee
from dpoptax.accounting._statement import claim_text
from dpoptax.auditing._batch_laws import Integers, law_of
from dpoptax.auditing._closer_laws import LENGTHS, closer_law, findings_under, row_groups
from dpoptax.auditing._exact_scores import Finding, rejected
from dpoptax.sampling import Sample, Sampler
from dpoptax.sampling._cyclic import CyclicPoissonSampler

# The number of findings that a report shows.
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class BatchReport:
    """Holds the result of `check_batches`.

    Attributes:
      claimed: the claimed sampler.
      sizes: the number of records of each batch, (steps,).
      impossible: sentences about batches that the claimed sampler cannot draw.
      tests: all tests, with their p-values.
      closer: another law that the tests do not refute; None without an alarm, or if all are.
      participations: the greatest number of times that one record was drawn.
      claimed_guarantee: the guarantee of the claim; None if no noise was given, or if the sampler
        has no event.
      seen_guarantee: a guarantee without amplification, for the batches as they were seen. None
        without an alarm if the claim has a guarantee, and if batches depend on the records.
    """

    claimed: Sampler
    sizes: Integers = dataclasses.field(repr=False)
    impossible: tuple[str, ...]
    tests: tuple[Finding, ...] = dataclasses.field(repr=False)
    closer: str | None
    participations: int
    claimed_guarantee: Guarantee | None = dataclasses.field(default=None, repr=False)
    seen_guarantee: Guarantee | None = dataclasses.field(default=None, repr=False)

    @functools.cached_property
    def findings(self) -> tuple[Finding, ...]:
        """The tests that refute the claim, by Holm's method."""
        return rejected(self.tests)

    @property
    def alarm(self) -> bool:
        """True if the batches are not draws of the claimed sampler.

        Draws of the claimed sampler raise an alarm with a probability of at most 1 in 1,000.
        """
        return bool(self.impossible or self.findings)

    def __str__(self) -> str:
        low, high = self.sizes.min(), self.sizes.max()
        between = f"{low:,} to {high:,} records" if low < high else f"{low:,} records"
        verdict = "NOT draws of it" if self.alarm else "not contradicted"
        shown = [*self.impossible, *map(str, self.findings)]
        lines = [
            f"{len(self.sizes):,} batches of {between}, {self.sizes.mean():,.1f} on average",
            f"claimed: {self.claimed.law}: {verdict}",
            *(f"  {text}" for text in shown[:_SHOWN]),
        ]
        if len(shown) > _SHOWN:
            lines.append(f"  and {len(shown) - _SHOWN:,} more")
        if self.alarm:
            lines.append(f"closer: {self.closer or 'none of the known laws'}")
        for name, guarantee in (
            ("claimed", self.claimed_guarantee),
            ("without amplification", self.seen_guarantee),
        ):
            if guarantee is not None:
                terms = guarantee.stated_delta, guarantee.unit, guarantee.neighboring_relation
                lines.append(f"{name}: {claim_text(guarantee.stated_epsilon, *terms)}")
        return "\n".join(lines)


def check_batches(
    batches: Iterable[ArrayLike | Sample],
    *,
    dataset_size: int,
    claimed: Sampler,
    lengths: ArrayLike | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    delta: float | None = None,
) -> BatchReport:
    """Checks whether the batches of any loader are draws of a claimed sampler.

    Amplification by sampling holds for one law of the batches. The tests compare

    - the sizes of batches with their law: mean, spread and extremes;
    - records with those of the batch before, of the last N/B steps, and of all steps before;
    - each batch with every earlier one, which finds a seed that is used again;
    - the rates of groups of rows, and their spread over batches: eighths of the data in order and
      of `lengths`, and remainders modulo 8, 3, 5 and 7, such as the shards of hosts.

    Records that a batch holds twice, or draws too early, refute a claim at once. All p-values are
    exact or conservative, and Holm's method bounds their union: correct draws raise an alarm with a
    probability of at most 1 in 1,000. Without an alarm, the batches may still have another law that
    the tests do not see, or a weak generator. A few epochs suffice. Equal batches have equal
    reports.

    The report compares two prices if `noise_multiplier` is given. Without amplification,

        ε of k Gaussian releases,   k = max over records of Σ_t m_t²,

    where m_t counts a record in batch t. It holds even if the adversary knows all batches. It
    assumes that no record changes the batches of the others.

    Privacy: batches are as secret as the sampler's seed, and so is the report.

    Args:
      batches: the row numbers of each batch, without padding, from the first step of a run on. A
        `Sample` is read with its mask. To compare two runs or two epochs, pass both, one after the
        other.
      dataset_size: N, the number of rows, or of users if the loader draws users.
      claimed: the sampler that the accounting assumes, with or without a seed.
      lengths: (N,), a number for each record by which a loader might sort.
      noise_multiplier: σ, to show prices.
      steps: the number of releases to price; by default, the number of batches. Later batches are
        assumed to be like these.
      delta: δ of the prices, as for `accounting.planned_guarantee`.

    Raises:
      TypeError: the law of `claimed` is not known, or a batch does not hold integers.
      ValueError: `batches` is empty, rows are outside of [0, N), `dataset_size` is not that of
        `claimed`, or it has a `max_batch_size` and steps that depend on each other.

    >>> from dpoptax import sampling
    >>> rng = np.random.default_rng(0)
    >>> epochs = [rng.permutation(1000).reshape(20, 50) for _ in range(3)]
    >>> claim = sampling.PoissonSampler(dataset_size=1000, batch_size=50)
    >>> report = check_batches(np.concatenate(epochs), dataset_size=1000, claimed=claim)
    >>> report.alarm, report.closer, report.participations
    (True, 'shuffled epochs', 3)
    """
    law = law_of(claimed)
    if dataset_size != claimed.dataset_size:
        raise ValueError(
            f"`dataset_size` must be that of `claimed`, {claimed.dataset_size}, got "
            f"{dataset_size}. A price for another number of records is not that of this run."
        )
    rows = [_rows(batch, dataset_size, step) for step, batch in enumerate(batches)]
    if not rows:
        raise ValueError("`batches` must hold at least one batch, got none.")
    partitions = row_groups(dataset_size, lengths)
    distinct = [np.unique(each) for each in rows]
    impossible, tests = findings_under(distinct, law, claimed, partitions)
    repeats = _repeats(rows, distinct)
    report = BatchReport(
        claimed,
        np.array([len(each) for each in rows]),
        (*repeats, *impossible),
        tuple(tests),
        closer=None,
        participations=int(np.bincount(np.concatenate(rows)).max(initial=0)),
    )
    if report.alarm:
        known = closer_law(distinct, claimed, partitions)
        closer = "batches with replacement" if repeats else known
        report = dataclasses.replace(report, closer=closer)
    if noise_multiplier is None:
        return report
    terms = {"noise_multiplier": noise_multiplier, "delta": delta}
    claim, seen = _guarantees(report, rows, steps or len(rows), terms)
    return dataclasses.replace(report, claimed_guarantee=claim, seen_guarantee=seen)


def _rows(batch: ArrayLike | Sample, size: int, step: int) -> Integers:
    """Returns the rows of a batch as integers in [0, N)."""
    rows = np.asarray(batch.indices[batch.mask] if isinstance(batch, Sample) else batch)
    if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise TypeError(
            "`batches` must hold row numbers of shape (records,), got shape "
            f"{rows.shape} and dtype {rows.dtype} in batch {step}."
        )
    rows = rows.astype(np.int64)
    if rows.size and not 0 <= rows.min() <= rows.max() < size:
        raise ValueError(
            f"`batches` must hold rows from 0 to {size - 1}, got {rows.min()} to {rows.max()} in "
            f"batch {step}. Leave out padding."
        )
    return rows


def _repeats(rows: Sequence[Integers], distinct: Sequence[Integers]) -> list[str]:
    number = sum(len(a) != len(b) for a, b in zip(rows, distinct, strict=True))
    return [f"{number:,} batches hold a record twice"] if number else []


def _guarantees(
    report: BatchReport, rows: Sequence[Integers], steps: int, terms: dict[str, Any]
) -> tuple[Guarantee | None, Guarantee | None]:
    """Returns the guarantee of the claim, and one of the batches as they were seen."""
    claimed = report.claimed
    has_event = claimed.neighboring_relation != "none"
    claim = planned_guarantee(sampler=claimed, steps=steps, **terms) if has_event else None
    by_length = any(each.name == f"mix by {LENGTHS}" for each in report.findings)
    if by_length or (has_event and not report.alarm):
        return claim, None
    # Every record in every step: k releases with all their noise.
    size = claimed.dataset_size
    everyone = CyclicPoissonSampler(size, size, unit=claimed.unit)
    releases = _releases(rows, size, steps)
    return claim, planned_guarantee(sampler=everyone, steps=releases, **terms)


def _releases(rows: Sequence[Integers], size: int, steps: int) -> int:
    """Returns the largest Σ_t m_t² of a record in `steps` steps, like those seen if more."""
    squares = np.zeros(size, np.int64)
    for each in rows[:steps]:
        found, times = np.unique(each, return_counts=True)
        squares[found] += times**2
    return int(squares.max()) * math.ceil(steps / min(steps, len(rows)))
