"""Defines the rows that a study computes, and helpers to compare claims with them."""

from typing import Any

import numpy as np

Row = dict[str, Any]
Findings = list[tuple[str, str, str]]


def verdict(*points: Any) -> str:
    """Returns "yes" if all values are true, "no" if all are false, else "in part"."""
    held = np.concatenate([np.ravel(point) for point in points]).astype(bool)
    return "yes" if held.all() else "in part" if held.any() else "no"


def pick(rows: list[Row], column: str, **where: Any) -> np.ndarray:
    """Returns one column of the rows whose other columns have the given values."""
    kept = (row for row in rows if all(row[name] == value for name, value in where.items()))
    return np.array([row[column] for row in kept])


def over(rows: list[Row], x: str, y: str, **where: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted values of `x`, (n,), and of `y` for each seed, (seeds, n)."""
    xs = np.unique(pick(rows, x, **where))
    return xs, np.stack([pick(rows, y, **{**where, x: value}) for value in xs], axis=1)
