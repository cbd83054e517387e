"""Checks whether the batches of any loader are draws of a claimed sampler."""

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpoptax.accounting import Guarantee, planned_guarantee
from dpoptax.accounting._statement import claim_text
from dpoptax.auditing._batch_laws import Law, candidates, law_of
from dpoptax.auditing._batch_tests import Partition, tests_under
from dpoptax.auditing._exact_scores import Checked, Finding, Integers, rejected
from dpoptax.sampling import FixedSizeSampler, Sample, Sampler
from dpoptax.sampling._cyclic import CyclicPoissonSampler

PLACES, LENGTHS, REMAINDERS = "eighths of the rows", "eighths by length", "remainders modulo"
# The number of findings that a report shows.
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class BatchReport(Checked):
    """Holds the result of `check_batches`.

    Attributes:
      claimed: the claimed sampler.
      sizes: the number of records of each batch, (steps,).
      impossible: sentences about batches that the claimed sampler cannot draw.
      tests: all tests, with their p-values.
      closer: another law that the tests do not refute, or an order by length; None without an
        alarm, or if no known one fits.
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
    partitions = _row_groups(dataset_size, lengths)
    distinct = [np.unique(each) for each in rows]
    impossible, tests = _findings_under(distinct, law, claimed, partitions)
    number = sum(len(a) != len(b) for a, b in zip(rows, distinct, strict=True))
    repeats = [f"{number:,} batches hold a record twice"] if number else []
    report = BatchReport(
        claimed,
        np.array([len(each) for each in rows]),
        (*repeats, *impossible),
        tuple(tests),
        closer=None,
        participations=int(np.bincount(np.concatenate(rows)).max(initial=0)),
    )
    if report.alarm:
        known = _closer_law(distinct, claimed, partitions)
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


def _row_groups(size: int, lengths: ArrayLike | None) -> list[Partition]:
    """Returns groups of rows by their place in the data, by lengths and by remainders."""
    row = np.arange(size)
    eighths = tuple("12345678")
    found = [Partition(PLACES, row * 8 // size, eighths)]
    if lengths is not None:
        values = np.asarray(lengths)
        if values.shape != (size,):
            raise ValueError(f"`lengths` must have shape ({size},), got {values.shape}.")
        rank = np.empty(size, np.int64)
        rank[np.argsort(values, kind="stable")] = row
        found.append(Partition(LENGTHS, rank * 8 // size, eighths))
    # In this order the first halving separates even rows, and the second remainders modulo 4.
    reversed_bits = np.array([0, 4, 2, 6, 1, 5, 3, 7])
    for modulus in (8, 3, 5, 7):
        order = np.argsort(reversed_bits) if modulus == 8 else np.arange(modulus)
        labels = tuple(str(each) for each in np.argsort(order))
        found.append(Partition(f"{REMAINDERS} {modulus}", order[row % modulus], labels))
    return found


def _findings_under(
    distinct: Sequence[Integers], law: Law, claimed: Sampler, partitions: Sequence[Partition]
) -> tuple[list[str], list[Finding]]:
    """Returns the impossible batches under a law, and the tests of the others."""
    # By the claim and not by the sizes of batches, of which a score may only know the earlier ones.
    window = max(1, round(claimed.dataset_size / claimed.batch_size) - 1)
    return tests_under(law, distinct, window, partitions, _randomization(distinct))


def _randomization(distinct: Sequence[Integers]) -> np.random.Generator:
    """Returns the generator that randomizes scores, a function of the batches.

    A fixed stream would make the scores of small counts about the same for all batches, so that
    false alarms are rare only on average over streams. Streams of different batches are independent
    if SHA-256 behaves like a random function.
    """
    digest = hashlib.sha256()
    for rows in distinct:
        digest.update(len(rows).to_bytes(8, "big") + rows.tobytes())
    return np.random.default_rng(int.from_bytes(digest.digest(), "big"))


def _closer_law(
    distinct: Sequence[Integers], claimed: Sampler, partitions: Sequence[Partition]
) -> str | None:
    """Names a law that the tests do not refute, or an order of the batches, if one fits."""
    known = _unrefuted_law(distinct, claimed, partitions)
    lengths = [each for each in partitions if each.name == LENGTHS]
    if known is None and any(_share_a_group(distinct, each) for each in lengths):
        return "batches sorted by length"
    return known or _law_of_hosts(distinct, claimed)


def _unrefuted_law(
    distinct: Sequence[Integers], claimed: Sampler, partitions: Sequence[Partition]
) -> str | None:
    filled = [each.tobytes() for each in distinct if len(each)]
    if 4 * (len(filled) - len(set(filled))) > len(distinct):
        return "the same batches again"
    for name, law in candidates(distinct, claimed):
        impossible, tests = _findings_under(distinct, law, claimed, partitions)
        if not impossible and not rejected(tests):
            return name
    return None


def _share_a_group(distinct: Sequence[Integers], partition: Partition) -> bool:
    """True if two records of a batch share their eighth by length twice as often as by chance."""
    tallies = np.array([partition.tally(each) for each in distinct])
    pairs = (tallies * (tallies - 1)).sum()
    return bool(4 * pairs > (tallies.sum(axis=1) * (tallies.sum(axis=1) - 1)).sum())


def _law_of_hosts(distinct: Sequence[Integers], claimed: Sampler) -> str | None:
    """Names the law of the records of each host, if all draw equally many by the same one."""
    size = claimed.dataset_size
    row = np.arange(size)
    for hosts in range(min(8, size), 1, -1):
        for host in (row * hosts // size, row % hosts):
            drawn = [np.bincount(host[each], minlength=hosts) for each in distinct]
            if not np.ptp(drawn, axis=1).any():
                laws = {_law_of_host(distinct, claimed, host == number) for number in range(hosts)}
                if len(laws) == 1 and None not in laws:
                    return f"{laws.pop()} on each of {hosts} hosts"
    return None


def _law_of_host(
    distinct: Sequence[Integers], claimed: Sampler, own: NDArray[np.bool_]
) -> str | None:
    """Names the law of the records of one host, which are numbered from 0."""
    number, size = np.cumsum(own) - 1, int(own.sum())
    batch_size = max(1, size * claimed.batch_size // claimed.dataset_size)
    parts = [number[each[own[each]]] for each in distinct]
    return _unrefuted_law(parts, FixedSizeSampler(size, batch_size), [])
