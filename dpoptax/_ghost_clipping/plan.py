"""Defines how the norm and the sum of each parameter's gradients are computed.

Gradients of a parameter are either represented by factors (`Product`) or formed. For a dense layer
`x @ w + b`, `w` is a `Product` with one `PlannedUse` and the method "outer", and `b` is formed.

The method for a norm is chosen by costs of memory and arithmetic, and by precision. The choice only
decides between equivalent methods: the clipping bound holds for each. The unit of cost is one
multiply-add. The costs were tuned by hand on one x86 CPU, for every platform. On a machine with
other costs, the chosen method may be slower.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax

from dpoptax import _ghost_clipping, _losses
from dpoptax._losses.traced_program import Use
from dpoptax._rounding.bounds import UNIT_ROUNDOFF, largest_ratio

if TYPE_CHECKING:
    from dpoptax._ghost_clipping.factor_products import Segment
    from dpoptax._losses.rules import FactorLayout
    from dpoptax._losses.views import View

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


@dataclasses.dataclass(frozen=True)
class PullBackCounts:
    """Counts the outer products and fixed terms after pulling back.

    Attributes:
      segments: the outer products of all points together.
      positions: the positions of each outer product.
      fixed_terms: the fixed terms of all points together.
    """

    segments: int
    positions: int
    fixed_terms: int


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedUse:
    """Pairs a use of a parameter with the layout in which the parameter is read.

    For a dense layer, `use` and `layout` describe everything. The other attributes are for
    tied, concatenated and normalized parameters.

    Attributes:
      use: the use.
      layout: the layout of the use, or of the part that belongs to one of several concatenated
        parameters.
      leaf: the parameter.
      part: the entries that are read, cut by `layout`; `None` for the whole parameter as it is.
      cut: selects the part of the factors; `None` for all.
      swapped: whether the rows of the use are the columns of the product.
      pull_back_counts: the numbers of factors after pulling back, if the used value is computed
        from the parameter; otherwise `None`.
    """

    use: Use
    layout: "FactorLayout"
    leaf: int
    part: "View | None" = None
    cut: "Callable[[Segment], Segment] | None" = None
    swapped: bool = False
    pull_back_counts: PullBackCounts | None = None

    @property
    def view(self) -> "View":
        """Returns the entries that are read, cut by `layout`."""
        return self.part or _losses.views.View.identity(self.leaf, self.layout.split)

    @property
    def scale(self) -> float:
        """Returns the factor of the entries that are read."""
        return self.part.scale if self.part else 1.0

    @property
    def positions(self) -> int:
        counts = self.pull_back_counts
        return self.use.rule.positions if counts is None else counts.positions

    @property
    def weighs_operand(self) -> bool:
        """Returns whether the sum multiplies the operand by coefficients, not the cotangent.

        The use must not be a lookup, whose operand is integers.
        """
        _, rows, columns = self.layout.sizes
        return not weighs_rows(columns, rows) if self.swapped else weighs_rows(rows, columns)

    def segments(self, points: int) -> int:
        """Returns the number of segments.

        Points share an operand that does not depend on parameters.
        """
        if self.pull_back_counts is not None:
            return self.pull_back_counts.segments
        return points if self.use.operand_varies else 1


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """Holds uses of one parameter, or of one slice of it, that share a layout.

    Their factors are joined along L. `method` is the method for the norm: "outer", "gram" or
    "form". While `make_plan` runs, it may also be "keep": the gradient is formed and kept for the
    sum. The parameter is then moved to `Plan.formed`, or the product gets another method.
    """

    members: tuple[PlannedUse, ...]
    method: str
    shape: tuple[int, ...]  # the parameter's shape

    @property
    def leaf(self) -> int:
        return self.members[0].leaf

    @property
    def is_pulled(self) -> bool:
        """Returns whether gradients are pulled back from a derived value."""
        return any(member.pull_back_counts for member in self.members)

    @property
    def fixed_terms(self) -> int:
        """Returns the number of fixed terms added to the products."""
        return _count_fixed_terms(self.members)

    @property
    def layout(self) -> "FactorLayout":
        return self.members[0].layout

    def place(self, total: jax.Array) -> jax.Array:
        """Returns a sum of gradients, (K, R, D), in the shape of the parameter."""
        part = self.members[0].part
        if part is None:
            return self.layout.fold(total, self.shape)
        # The factors include the scale.
        part = dataclasses.replace(part, scale=1.0)
        return part.scatter(self.layout.fold(total, self.layout.split), self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Holds the method chosen for each parameter.

    Attributes:
      products: gradients that are represented by factors.
      formed: parameters whose per-example gradients are formed, each with the reason for a
        fallback. The reason is empty if forming is cheaper, for the parameter or for one that is
        used with it.
      formed_uses: the uses of formed parameters.
    """

    products: tuple[Product, ...]
    formed: dict[int, str]
    formed_uses: tuple[Use, ...] = ()


def weighs_rows(rows: int, columns: int) -> bool:
    """Returns whether a sum multiplies rows, not columns, by coefficients: the smaller factor."""
    return rows < columns


def unweighted_sides(plan: Plan) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the uses whose operand must be finite, and those whose cotangent must be.

    The sum does not multiply it by coefficients, and an example that adds nothing has a coefficient
    of zero.
    """
    dense = [m for each in plan.products for m in each.members if not m.use.rule.is_lookup]
    # If the other factor gets a coefficient of zero, an infinity here would give 0 · ∞ and make the
    # whole sum NaN. Pulling back mixes both factors, so both must be finite.
    return (
        frozenset(m.use.index for m in dense if m.pull_back_counts or not m.weighs_operand),
        frozenset(m.use.index for m in dense if m.pull_back_counts or m.weighs_operand),
    )


def has_one_position(members: list[PlannedUse], points: int) -> bool:
    """Returns whether a gradient is a single outer product."""
    only = members[0]
    counts = len(members), only.positions, only.segments(points)
    return counts == (1, 1, 1) and only.pull_back_counts is None


def choose_product_method(members: list[PlannedUse], examples: int, points: int) -> str:
    """Returns the method for uses that are joined to one product; see `choose_method`."""
    if has_one_position(members, points):
        return "outer"
    _, rows, columns = members[0].layout.sizes
    segments = [member.segments(points) for member in members]
    positions = sum(m.positions * n for m, n in zip(members, segments, strict=True))
    terms = _count_fixed_terms(members)
    fixed = points if terms else 0
    method = choose_method(examples, positions, rows, columns, segments=sum(segments), fixed=fixed)
    if any(member.use.rule.is_lookup for member in members):
        # A one-hot factor makes inner products cheap and the formed gradient sparse.
        return "outer" if method == "outer" else "gram"
    # With fixed terms, the gradient has further products, so its norm needs inner products.
    return "gram" if terms and method != "keep" else method


def _count_fixed_terms(members: Sequence[PlannedUse]) -> int:
    counts = [member.pull_back_counts for member in members]
    return sum(each.fixed_terms for each in counts if each is not None)


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
        roundings_of = _ghost_clipping.factor_products.roundings_of
        own = roundings_of(rows) / math.sqrt(columns), roundings_of(columns) / math.sqrt(rows)
        roundings = sum(own) + 2 * positions / math.sqrt(rows * columns)
    longer = math.sqrt(1.0 + UNIT_ROUNDOFF * roundings * positions)
    return 1.0 / max(longer, math.sqrt(positions) / largest_ratio(positions))


def is_precise(method: str, positions: int, rows: int, columns: int) -> bool:
    """Returns whether rounding hardly shortens gradients of uncorrelated positions."""
    few = positions <= _MOST_POSITIONS
    return few and kept_share(method, positions, rows, columns) >= _PRECISE_SHARE
