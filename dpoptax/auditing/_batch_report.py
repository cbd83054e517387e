"""The report of a check of batches."""

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from dpoptax.accounting import Guarantee
from dpoptax.accounting._statement import claim_text
from dpoptax.auditing._findings import Finding, rejected
from dpoptax.sampling import Sampler

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
    sizes: NDArray[np.int64] = dataclasses.field(repr=False)
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
        return "\n".join(lines + _price_lines(self))


def _price_lines(report: BatchReport) -> list[str]:
    lines = []
    for name, guarantee in (
        ("claimed", report.claimed_guarantee),
        ("without amplification", report.seen_guarantee),
    ):
        if guarantee is not None:
            terms = guarantee.stated_delta, guarantee.unit, guarantee.neighboring_relation
            lines.append(f"{name}: {claim_text(guarantee.stated_epsilon, *terms)}")
    return lines
