"""Chooses how the norm and the sum of each parameter's gradients are computed.

`make_plan` is the entry point. Gradients of a parameter are either represented by factors
(`Product`) or formed. For a dense layer `x @ w + b`, `w` is a `Product` with one `PlannedUse` and
the method "outer", and `b` is formed.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from jax import lax

from dpoptax._gradients.ghost_clipping import cost_model
from dpoptax._gradients.ghost_clipping.norms.factor_products import Segment
from dpoptax._gradients.ghost_clipping.trace.entry_rules import Lookup
from dpoptax._gradients.ghost_clipping.trace.program import Program, Use
from dpoptax._gradients.ghost_clipping.trace.rules import FactorLayout
from dpoptax._gradients.ghost_clipping.trace.views import AxisRuns, View

if TYPE_CHECKING:
    from dpoptax._gradients.ghost_clipping.transformed.mapped_products import SideMap
    from dpoptax._gradients.ghost_clipping.transformed.point_differences import PullBackCounts
    from dpoptax._gradients.linear_map import Factor, LinearMap

# A view's offset in its parameter, and its axes as groups, rows and columns.
_LayoutKey = tuple[int, AxisRuns, AxisRuns, AxisRuns]


@dataclasses.dataclass(frozen=True)
class FactorSlice:
    """Selects the slice of a factor that belongs to one of concatenated parameters.

    The last axis of the factor is reshaped to `shape`, and sliced along `axis`.
    """

    acts_on_rows: bool
    shape: tuple[int, ...]
    axis: int
    start: int
    size: int

    def __call__(self, segment: Segment) -> Segment:
        factor = segment.rows if self.acts_on_rows else segment.columns
        lead = factor.shape[:-1]
        part = lax.slice_in_dim(
            factor.reshape(*lead, *self.shape), self.start, self.start + self.size,
            axis=len(lead) + self.axis,
        ).reshape(*lead, -1)  # fmt: skip
        return segment._replace(**{"rows" if self.acts_on_rows else "columns": part})


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedUse:
    """Pairs a use of a parameter with the layout in which the parameter is read.

    For a dense layer, `use`, `view` and `layout` describe everything. The other attributes are for
    concatenated, tied, normalized and mapped parameters.

    Attributes:
      use: the use.
      view: the entries of the parameter, cut by `layout`.
      layout: the layout of the use, or of the part that belongs to one of several concatenated
        parameters.
      cut: the part of the factors; `None` for all.
      swapped: whether the rows of the use are the columns of the product.
      pull_back_counts: the numbers of factors after pulling back, if the used value is computed
        from the parameter; otherwise `None`.
      mapping: how the parameter's linear map acts on the factors, `None` without a map.
    """

    use: Use
    view: View
    layout: FactorLayout
    cut: FactorSlice | None = None
    swapped: bool = False
    pull_back_counts: "PullBackCounts | None" = None
    mapping: "SideMap | None" = None

    @property
    def positions(self) -> int:
        return (
            self.use.positions if self.pull_back_counts is None else self.pull_back_counts.positions
        )

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
    def view(self) -> View:
        return self.members[0].view

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def is_pulled(self) -> bool:
        """Returns whether gradients are pulled back from a derived value."""
        return any(member.pull_back_counts for member in self.members)

    @property
    def is_transformed(self) -> bool:
        """Returns whether gradients are pulled back, or mapped before the clip."""
        return self.mapping is not None or self.is_pulled

    @property
    def terms(self) -> int:
        """Returns the number of fixed terms added to the products."""
        return _count_terms(self.members)

    @property
    def layout(self) -> FactorLayout:
        return self.members[0].layout

    @property
    def mapping(self) -> "SideMap | None":
        """Returns how the parameter's linear map acts on the factors."""
        return self.members[0].mapping


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
    formed_uses: tuple[Use, ...]


def make_plan(
    program: Program,
    examples: int,
    points: int,
    linear_map: "LinearMap | None" = None,
    *,
    has_tangent: bool = False,
) -> Plan:
    """Returns the plan for `examples` at `points` gradient points.

    `has_tangent` says whether a Hessian-vector product is added, as for `disk(gamma=0)`. It costs
    as much as one more point. Gradients are then not pulled back, because the derivatives of the
    fixed arrays along the tangent are not represented by factors.
    """
    factors = {} if linear_map is None else dict(enumerate(linear_map.factors))
    mapped = {leaf for leaf, factor in factors.items() if factor is not None}
    formed = {i: f"meets data in {', '.join(why)}" for i, why in program.opaque.items()}
    leaf_uses: dict[int, list[PlannedUse]] = {}
    for use in program.uses:
        pull = not has_tangent and not use.value.leaves & mapped
        members = read_use(use) or (_pull_back_use(program, use, points) if pull else [])
        for leaf in use.value.leaves if not members else ():
            formed.setdefault(leaf, f"computed on before it meets data in {use.rule.name}")
        for member in members:
            leaf = member.view.leaf
            shape = tuple(program.parameters[leaf].shape)
            arranged = _map_sides(member, factors[leaf], shape) if factors else member
            if arranged is None:
                formed.setdefault(leaf, "its linear map mixes the two sides of its products")
            else:
                leaf_uses.setdefault(leaf, []).append(arranged)
    joined = {}
    for leaf, members in leaf_uses.items():
        shape = tuple(program.parameters[leaf].shape)
        found = _join_uses(members, (examples, points + has_tangent), shape)
        if found is None:
            formed.setdefault(leaf, "its uses overlap in different layouts")
        else:
            joined[leaf] = found
    if any(p.method == "keep" for found in joined.values() for p in found):
        _choose_formed(program, joined, formed, mapped)
    if any(len(use.value.leaves) > 1 for use in program.uses):
        _form_coupled(program, formed)
    products = [p for leaf, found in joined.items() if leaf not in formed for p in found]
    formed_uses = [u for u in program.uses if u.value.leaves & set(formed)]
    return Plan(tuple(products), formed, tuple(formed_uses))


def _choose_formed(
    program: Program, joined: dict[int, list[Product]], formed: dict[int, str], mapped: set[int]
) -> None:
    """Moves parameters whose method is "keep" to `formed`.

    All parameters that are used together with a formed parameter are also formed. If these are
    larger, or a linear map acts on the factors, the gradient is formed for the norm but not kept.
    With fixed terms it is not formed at all.
    """
    sizes = [p.size for p in program.parameters]
    kept = {
        leaf for leaf, found in joined.items() if all(p.method == "keep" for p in found)
    } - mapped
    for leaf, found in joined.items():
        coupled = _find_coupled(program, {leaf}) - kept
        if leaf in kept and sum(sizes[other] for other in coupled) <= sizes[leaf]:
            formed.setdefault(leaf, "")
        else:
            joined[leaf] = [
                dataclasses.replace(p, method="gram" if p.terms else "form")
                if p.method == "keep"
                else p
                for p in found
            ]


def _form_coupled(program: Program, formed: dict[int, str]) -> None:
    """Adds the parameters that are used together with a formed one."""
    # If a parameter fell back, all parameters of its uses are formed.
    fallen = _find_coupled(program, {leaf for leaf, why in formed.items() if why}) - set(formed)
    formed |= dict.fromkeys(fallen, "used side by side with a parameter that fell back")
    formed |= dict.fromkeys(_find_coupled(program, set(formed)), "")


def _find_coupled(program: Program, leaves: set[int]) -> set[int]:
    """Returns other parameters that share uses with these, directly or indirectly."""
    found = set(leaves)
    while True:
        uses = [use.value.leaves for use in program.uses if use.value.leaves & found]
        if not (new := set().union(*uses) - found):
            return found - leaves
        found |= new


def read_use(use: Use) -> list[PlannedUse]:
    """Returns the parameters of a use with their layouts.

    The list is empty if the used value does more than move entries of parameters.
    """
    value, layout = use.value, use.layout
    if value.view is not None:
        view = value.view.reshape(layout.split)
        return [] if view is None else [PlannedUse(use, view, layout)]
    if value.tiles is None or isinstance(use.rule, Lookup):
        return []
    axis, parts = value.tiles
    joined_shape = (
        *parts[0].shape[:axis],
        sum(p.shape[axis] for p in parts),
        *parts[0].shape[axis + 1 :],
    )
    side = layout.rows if axis in layout.rows else layout.columns
    if joined_shape != layout.split or axis not in side:
        return []
    members, start = [], 0
    for part in parts:
        size = part.shape[axis]
        cut = FactorSlice(
            side is layout.rows, tuple(joined_shape[i] for i in side), side.index(axis), start, size
        )
        members.append(PlannedUse(use, part, dataclasses.replace(layout, split=part.shape), cut))
        start += size
    return members


def _map_sides(
    member: PlannedUse, factor: "Factor | None", shape: tuple[int, ...]
) -> PlannedUse | None:
    """Adds the linear map on the factors to a use; `None` if the map mixes the sides."""
    if factor is None:
        return member
    from dpoptax._gradients.ghost_clipping.transformed.mapped_products import make_side_map

    mapping = make_side_map(factor, member.view, member.layout, shape)
    if mapping is None or (isinstance(member.use.rule, Lookup) and mapping.mixes_rows):
        return None
    return dataclasses.replace(member, mapping=mapping)


def _pull_back_use(program: Program, use: Use, points: int) -> list[PlannedUse]:
    """Returns the parameters behind a used value, if gradients can be pulled back."""
    if use.value.scans or isinstance(use.rule, Lookup):
        return []
    from dpoptax._gradients.ghost_clipping.transformed.point_differences import count_parts

    found = count_parts(use, program.parameters, points)
    members = []
    for leaf, layout, counts in found:
        view = View.identity(leaf, tuple(program.parameters[leaf].shape)).reshape(layout.split)
        if view is None:
            return []
        members.append(PlannedUse(use, view, layout, pull_back_counts=counts))
    return members


def _join_uses(
    members: list[PlannedUse], counts: tuple[int, int], shape: tuple[int, ...]
) -> list[Product] | None:
    """Joins the uses of one parameter to products; `None` if these would overlap.

    `counts` are the numbers of examples and of gradient points.
    """
    if len(members) == 1:
        return [Product(tuple(members), choose_product_method(members, *counts), shape)]
    by_layout: dict[_LayoutKey, list[PlannedUse]] = {}
    for member in members:
        view, layout = member.view, member.layout
        groups, rows, columns = map(view.runs, layout.sides)
        key = (view.offset, groups, rows, columns)
        mirror = (view.offset, groups, columns, rows)
        swapped = key not in by_layout and mirror in by_layout
        joined = by_layout.setdefault(mirror if swapped else key, [])
        joined.append(dataclasses.replace(member, swapped=swapped))
    if any(m.pull_back_counts for m in members):
        # A fixed term covers the whole parameter, so all uses must read it in the same layout.
        every = [m for joined in by_layout.values() for m in joined]
        if any(m.swapped or m.layout != every[0].layout for m in every):
            return None
        if any(isinstance(m.use.rule, Lookup) for m in every):
            return None
    if len(by_layout) > 1:
        seen = np.zeros(math.prod(shape), bool)
        for joined in by_layout.values():
            # Views overlap if an entry was seen before.
            entries = joined[0].view.entries_of(seen)
            if entries.any():
                return None
            entries[...] = True
    return [Product(tuple(g), choose_product_method(g, *counts), shape) for g in by_layout.values()]


def _count_terms(members: Iterable[PlannedUse]) -> int:
    counts = [member.pull_back_counts for member in members]
    return sum(each.terms for each in counts if each is not None)


def choose_product_method(members: list[PlannedUse], examples: int, points: int) -> str:
    """Returns the method for uses that are joined to one product; see `choose_method`."""
    _, rows, columns = members[0].layout.sizes
    segments = [m.segments(points) for m in members]
    positions = sum(m.positions * n for m, n in zip(members, segments, strict=True))
    terms = _count_terms(members)
    fixed = points if terms else 0
    method = cost_model.choose_method(
        examples, positions, rows, columns, segments=sum(segments), fixed=fixed
    )
    if any(isinstance(m.use.rule, Lookup) for m in members):
        # A one-hot factor makes inner products cheap and the formed gradient sparse.
        return "outer" if method == "outer" else "gram"
    return "gram" if terms and method != "keep" else method
