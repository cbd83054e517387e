"""Chooses the method for a norm, by costs of memory and arithmetic, and by precision.

The choice only decides between equivalent methods: the clipping bound holds for each. The unit of
cost is one multiply-add. The costs were tuned by hand on one x86 CPU, for every platform. On a
machine with other costs, the chosen method may be slower.
"""

import math

from dpoptax._ghost_clipping.norms.factor_products import roundings_of
from dpoptax._rounding.bounds import UNIT_ROUNDOFF, largest_ratio

# An entry of a formed gradient that is written once and read twice. One that is only read once
# costs three quarters.
_KEPT_ENTRY = 120
_FORMED_ENTRY = 90
# An entry of a factor, which is measured and rounded.
_FACTOR_ENTRY = 40
# Gradients with so many entries stay in a cache, and may be kept at any ratio of sizes.
_CACHED_ENTRIES = 2**16
# How many times slower inner products must be at several gradient points before a gradient that is
# larger than its factors is kept.
_MEMORY_RATIO = 1.5
# Beyond so many positions, the rounding of a sum may use more than 2 % of the clipping bound.
_MOST_POSITIONS = 2**11
# Norms are precise if rounding leaves at least this share of a gradient.
_PRECISE_SHARE = 0.97


def choose_method(
    examples: int, positions: int, rows: int, columns: int, *, segments: int, fixed: int = 0
) -> str:
    """Chooses the cheapest precise method for the norm of products with `positions` = Σ_s L_s.

    The factors are dense. Gradients that are formed and kept are measured without error, others
    only if this is precise enough. There may be `fixed` additional terms with arrays that depend on
    the parameters, one for each point. The method of inner products then needs the inner product of
    each array with all products, which costs as much as the sum. If the gradient with respect to
    the parameter is formed, it is formed point by point, and kept.

    Returns:
      "outer" (one position: the product of two norms), "gram" (inner products), "form" (form the
      gradients, and contract again for the sum) or "keep" (form the gradients, and keep them for
      the sum).
    """
    if positions == 1 and segments == 1:
        return "outer"
    size, work, formed = rows * columns, positions * rows * columns, max(1, fixed)
    # Inner products are symmetric in pairs of segments, so about half of them are computed.
    pairs = positions**2 * (segments + 1) / (2 * segments)
    factors = _FACTOR_ENTRY * positions * (rows + columns)
    cost = {}
    if is_precise("gram", positions, rows, columns):
        cost["gram"] = factors + pairs * (rows + columns) + (1 + fixed) * work
    if not fixed and is_precise("form", positions, rows, columns):
        cost["form"] = factors + 2 * work + _FORMED_ENTRY * size
    kept = work + formed * _KEPT_ENTRY * size
    small = formed * size <= 2 * positions * (rows + columns) or examples * size <= _CACHED_ENTRIES
    several = fixed > 1 and cost.get("gram", math.inf) > _MEMORY_RATIO * kept
    if small or several or not cost:
        cost["keep"] = kept
    return min(cost, key=cost.__getitem__)


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
