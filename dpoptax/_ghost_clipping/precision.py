"""Estimates how much the bounds of rounding shorten gradients."""

import math

from dpoptax._rounding.bounds import UNIT_ROUNDOFF, largest_ratio

# Longer rows and columns, such as the logits of a large vocabulary, are contracted in parts, one
# after the other, so that rounding grows with the length and the number of parts.
LONG = 2**12
PART = 2**9
# Beyond so many positions, the rounding of a sum may use more than 2 % of the clipping bound.
_MOST_POSITIONS = 2**11
# Norms are precise if rounding leaves at least this share of a gradient.
_PRECISE_SHARE = 0.97


def kept_share(method: str, positions: int, rows: int, columns: int) -> float:
    """Returns the share of a clipped gradient of uncorrelated positions that rounding leaves.

    For L uncorrelated positions, S² is L n². If gradients are formed and added again, the square of
    the bound n⁺ exceeds n² by η S², with η for L roundings. Inner products of different rows are
    about 1/√R times the products of their norms, those of columns 1/√D times, and so are their
    errors. A gradient is also shortened if S exceeds M n.
    """
    if method not in ("gram", "form"):
        return 1.0
    roundings = float(positions)
    if method == "gram":
        own = roundings_of(rows) / math.sqrt(columns), roundings_of(columns) / math.sqrt(rows)
        roundings = sum(own) + 2 * positions / math.sqrt(rows * columns)
    longer = math.sqrt(1.0 + UNIT_ROUNDOFF * roundings * positions)
    return 1.0 / max(longer, math.sqrt(positions) / largest_ratio(positions))


def is_precise(method: str, positions: int, rows: int, columns: int) -> bool:
    """Returns whether rounding hardly shortens gradients of uncorrelated positions."""
    few = positions <= _MOST_POSITIONS
    return few and kept_share(method, positions, rows, columns) >= _PRECISE_SHARE


def roundings_of(size: int) -> int:
    """Returns the roundings in an inner product of rows, or of columns, of this length."""
    return size if size <= LONG else PART + size // PART + 1
