"""Chooses how the norm and the sum of each parameter's gradients are computed.

Gradients of a parameter are either represented by factors (`Product`) or formed. For a dense layer
`x @ w + b`, `w` is a `Product` with one `PlannedUse` and the method "outer", and `b` is formed.
"""

import dataclasses
from collections.abc import Callable

import jax

from dpoptax._ghost_clipping.cost_model import choose_method
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._losses.program import Use
from dpoptax._losses.rules import FactorLayout
from dpoptax._losses.views import View


@dataclasses.dataclass(frozen=True)
class PullBackCounts:
    """Counts the outer products and fixed terms after pulling back.

    Attributes:
      segments: the outer products of all points together.
      positions: the positions of each outer product.
      terms: the fixed terms of all points together.
    """

    segments: int
    positions: int
    terms: int


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedUse:
    """Pairs a use of a parameter with the layout in which the parameter is read.

    For a dense layer, `use` and `layout` describe everything. The other attributes are for
    tied, concatenated and normalized parameters.

    Attributes:
      use: the use.
      layout: the layout of the use, or of the part that belongs to one of several concatenated
        parameters.
      view: the entries of the parameter, cut by `layout`.
      cut: selects the part of the factors; `None` for all.
      swapped: whether the rows of the use are the columns of the product.
      pull_back_counts: the numbers of factors after pulling back, if the used value is computed
        from the parameter; otherwise `None`.
    """

    use: Use
    layout: FactorLayout
    view: View
    cut: Callable[[Segment], Segment] | None = None
    swapped: bool = False
    pull_back_counts: PullBackCounts | None = None

    @property
    def leaf(self) -> int:
        """Returns the parameter."""
        return self.view.leaf

    @property
    def positions(self) -> int:
        counts = self.pull_back_counts
        return self.use.rule.positions if counts is None else counts.positions

    @property
    def weighs_operand(self) -> bool:
        """Returns whether the sum multiplies the operand by coefficients, not the cotangent.

        It multiplies the smaller factor, and the columns of equal ones.
        """
        if self.use.rule.is_lookup:
            return False
        _, rows, columns = self.layout.sizes
        return rows < columns or (self.swapped and rows == columns)

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
    def terms(self) -> int:
        """Returns the number of fixed terms added to the products."""
        counts = [member.pull_back_counts for member in self.members]
        return sum(each.terms for each in counts if each is not None)

    @property
    def layout(self) -> FactorLayout:
        return self.members[0].layout

    def place(self, total: jax.Array) -> jax.Array:
        """Returns a sum of gradients, (K, R, D), in the shape of the parameter."""
        total = self.layout.fold(total, self.layout.split)
        # The factors include the scale.
        return dataclasses.replace(self.members[0].view, scale=1.0).scatter(total, self.shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Holds the method chosen for each parameter.

    Attributes:
      products: gradients that are represented by factors.
      formed: parameters whose per-example gradients are formed, each with the reason for a
        fallback. The reason is empty if forming is cheaper, for the parameter or for one that is
        used with it.
      formed_uses: the uses of formed parameters.
      is_pulled: whether gradients of a product are pulled back from a derived value.
    """

    products: tuple[Product, ...]
    formed: dict[int, str]
    formed_uses: tuple[Use, ...] = ()
    is_pulled: bool = False


def fixed_sides(plan: Plan) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the uses whose operand must be finite, and those whose cotangent must be.

    The sum does not multiply it by coefficients, and an example that adds nothing has a coefficient
    of zero.
    """
    members = [m for product in plan.products for m in product.members]
    dense = [m for m in members if not m.use.rule.is_lookup]
    pulled = frozenset(m.use.index for m in dense if m.pull_back_counts is not None)
    return (
        pulled | {m.use.index for m in dense if not m.weighs_operand},
        pulled | {m.use.index for m in dense if m.weighs_operand},
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
    terms = Product(tuple(members), "", ()).terms
    fixed = points if terms else 0
    method = choose_method(examples, positions, rows, columns, segments=sum(segments), fixed=fixed)
    if any(member.use.rule.is_lookup for member in members):
        # A one-hot factor makes inner products cheap and the formed gradient sparse.
        return "outer" if method == "outer" else "gram"
    return "gram" if terms and method != "keep" else method
