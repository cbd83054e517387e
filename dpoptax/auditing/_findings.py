"""Findings of checks, with one bound on false alarms for all tests of a check."""

from collections.abc import Sequence
from typing import NamedTuple

FALSE_ALARM = 1e-3
"""The probability that a correct run raises an alarm is at most this, for each check."""


class Finding(NamedTuple):
    """One test of a check.

    Attributes:
      name: the tested property.
      p_value: an upper bound on the probability that a correct run is at least this far off.
      effect: the observed number over the expected one.
      seen: the numbers, as a sentence.
    """

    name: str
    p_value: float
    effect: float
    seen: str

    def __str__(self) -> str:
        p_value = f"p = {self.p_value:.1g}" if self.p_value else "p < 1e-300"
        return f"{self.name}: {self.seen} ({p_value})"


def rejected(tests: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns the tests that Holm's method rejects, the smallest p-value first."""
    kept: list[Finding] = []
    for i, each in enumerate(sorted(tests, key=lambda test: test.p_value)):
        if each.p_value * (len(tests) - i) > FALSE_ALARM:
            break
        kept.append(each)
    return tuple(kept)
