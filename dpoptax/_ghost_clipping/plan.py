"""Decides, parameter by parameter, how the norm and the sum of its gradients are computed."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from jax import lax

from dpoptax._ghost_clipping.norms import factor_products as _products
from dpoptax._ghost_clipping.norms.cotangents import NotFactoredError
from dpoptax._ghost_clipping.norms.factor_products import Segment
from dpoptax._ghost_clipping.norms.mapped_products import Mapping, arrange
from dpoptax._ghost_clipping.norms.several_points import Pulled, foresee
from dpoptax._ghost_clipping.trace.entry_rules import Lookup
from dpoptax._ghost_clipping.trace.program import Program, Use
from dpoptax._ghost_clipping.trace.rules import Layout
from dpoptax._ghost_clipping.trace.views import Atoms, View
from dpoptax._linear_map import Factor, LinearMap

# The offset of a view in its parameter, and its axes: batch, rows, columns.
_Key = tuple[int, Atoms, Atoms, Atoms]


@dataclasses.dataclass(frozen=True)
class Cut:
    """A slice of a factor: of axis `axis` when its last axis is read as `shape`."""

    of_rows: bool
    shape: tuple[int, ...]
    axis: int
    start: int
    size: int

    def __call__(self, segment: Segment) -> Segment:
        whole = segment.rows if self.of_rows else segment.columns
        lead = whole.shape[:-1]
        part = lax.slice_in_dim(
            whole.reshape(*lead, *self.shape), self.start, self.start + self.size,
            axis=len(lead) + self.axis,
        ).reshape(*lead, -1)  # fmt: skip
        return segment._replace(**{"rows" if self.of_rows else "columns": part})


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """A use of a parameter, read in a layout.

    Attributes:
      use: the use.
      view: the entries of the parameter, cut by `layout`.
      layout: that of the use, or for one of several parameters side by side, its share of that.
      cut: which share, else `None`.
      swapped: whether its rows are the product's columns.
      pulled: what pulling its gradients back gives, where the parameter is not what is used but
        what that is made of.
      mapping: how the parameter's linear map goes on the sides, if there is one.
    """

    use: Use
    view: View
    layout: Layout
    cut: Cut | None = None
    swapped: bool = False
    pulled: Pulled | None = None
    mapping: Mapping | None = None

    @property
    def positions(self) -> int:
        return self.use.positions if self.pulled is None else self.pulled.positions

    def segments(self, points: int) -> int:
        """How many segments it gives: operands that no point changes are shared by all."""
        if self.pulled is not None:
            return self.pulled.segments
        return points if self.use.operand_varies else 1


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """Uses of one parameter (or of one slice of it) that share a layout: joined along T."""

    members: tuple[Member, ...]
    method: str
    shape: tuple[int, ...]  # of the parameter

    @property
    def view(self) -> View:
        return self.members[0].view

    @property
    def leaf(self) -> int:
        return self.view.leaf

    @property
    def pulled(self) -> bool:
        """Whether gradients by values made of the parameter are pulled back to it."""
        return any(member.pulled for member in self.members)

    @property
    def terms(self) -> int:
        """How many terms are beside the products."""
        return _terms(self.members)

    @property
    def layout(self) -> Layout:
        return self.members[0].layout

    @property
    def mapping(self) -> Mapping | None:
        """How the parameter's linear map goes on the sides."""
        return self.members[0].mapping


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is done for each parameter.

    Attributes:
      products: gradients that stay products of factors.
      formed: parameters whose per-example gradients are formed, and why; empty where that is
        cheaper, for the parameter or for one that it is used with.
      uses: the uses that reach formed parameters.
    """

    products: tuple[Product, ...]
    formed: dict[int, str]
    uses: tuple[Use, ...]


def make_plan(
    program: Program,
    batch: int,
    points: int,
    linear_map: LinearMap | None = None,
    *,
    tangent: bool = False,
) -> Plan:
    """Plans for `batch` examples and `points` gradient points, with a tangent or without.

    A tangent is as much work as one point more. What is pulled back has other fixed arrays along
    it, whose derivatives are not held as factors.
    """
    factors = {} if linear_map is None else dict(enumerate(linear_map.factors))
    mapped = {leaf for leaf, factor in factors.items() if factor is not None}
    formed = {i: f"meets data in {', '.join(why)}" for i, why in program.opaque.items()}
    by_leaf: dict[int, list[Member]] = {}
    for use in program.uses:
        pull = not tangent and not use.value.leaves & mapped
        members = _members(use) or (_pulled(program, use, points) if pull else [])
        for leaf in use.value.leaves if not members else ():
            formed.setdefault(leaf, f"computed on before it meets data in {use.rule.name}")
        for member in members:
            leaf = member.view.leaf
            shape = tuple(program.parameters[leaf].shape)
            arranged = _mapped(member, factors.get(leaf), shape)
            if arranged is None:
                formed.setdefault(leaf, "its linear map mixes the two sides of its products")
            else:
                by_leaf.setdefault(leaf, []).append(arranged)
    joined = {}
    for leaf, members in by_leaf.items():
        shape = tuple(program.parameters[leaf].shape)
        found = _join(members, (batch, points + tangent), shape)
        if found is None:
            formed.setdefault(leaf, "its uses overlap in different layouts")
        else:
            joined[leaf] = found
    _keep(program, joined, formed, mapped)
    fallen = _beside(program, {leaf for leaf, why in formed.items() if why}) - set(formed)
    formed |= dict.fromkeys(fallen, "used side by side with a parameter that fell back")
    formed |= dict.fromkeys(_beside(program, set(formed)), "")
    products = [p for leaf, found in joined.items() if leaf not in formed for p in found]
    rest = [u for u in program.uses if u.value.leaves & set(formed)]
    return Plan(tuple(products), formed, tuple(rest))


def _keep(
    program: Program,
    joined: dict[int, list[Product]],
    formed: dict[int, str],
    mapped: set[int],
) -> None:
    """Has gradients formed and kept where that was chosen: those of the parameter itself.

    It takes all of its products, and what it is used with is formed then, too. Where that is
    larger, or a linear map goes on the sides, they are formed and not kept; with terms, neither.
    """
    sizes = [p.size for p in program.parameters]
    kept = {
        leaf for leaf, found in joined.items() if all(p.method == "keep" for p in found)
    } - mapped
    for leaf, found in joined.items():
        beside = _beside(program, {leaf}) - kept
        if leaf in kept and sum(sizes[other] for other in beside) <= sizes[leaf]:
            formed.setdefault(leaf, "")
        else:
            joined[leaf] = [
                dataclasses.replace(p, method="gram" if p.terms else "form")
                if p.method == "keep"
                else p
                for p in found
            ]


def _beside(program: Program, leaves: set[int]) -> set[int]:
    """The other parameters in uses of these, and in uses of those in turn: all are formed."""
    found = set(leaves)
    while True:
        uses = [use.value.leaves for use in program.uses if use.value.leaves & found]
        if not (new := set().union(*uses) - found):
            return found - leaves
        found |= new


def _members(use: Use) -> list[Member]:
    """The parameters in a use, each with its layout; none where they are more than moved."""
    value, layout = use.value, use.layout
    if value.view is not None:
        view = value.view.reshape(layout.split)
        return [] if view is None else [Member(use, view, layout)]
    if value.tiles is None or isinstance(use.rule, Lookup):
        return []
    axis, parts = value.tiles
    whole = (*parts[0].shape[:axis], sum(p.shape[axis] for p in parts), *parts[0].shape[axis + 1 :])
    side = layout.rows if axis in layout.rows else layout.columns
    if whole != layout.split or axis not in side:
        return []
    members, start = [], 0
    for part in parts:
        size = part.shape[axis]
        cut = Cut(side is layout.rows, tuple(whole[i] for i in side), side.index(axis), start, size)
        members.append(Member(use, part, dataclasses.replace(layout, split=part.shape), cut))
        start += size
    return members


def _mapped(member: Member, factor: Factor | None, shape: tuple[int, ...]) -> Member | None:
    """The member with its parameter's map on its sides; None where it does not go there."""
    if factor is None:
        return member
    mapping = arrange(factor, member.view, member.layout, shape)
    if mapping is None or (isinstance(member.use.rule, Lookup) and mapping.mixes_rows):
        return None
    return dataclasses.replace(member, mapping=mapping)


def _pulled(program: Program, use: Use, points: int) -> list[Member]:
    """The parameters that a used value is made of, if gradients can be pulled back to all."""
    if use.value.scans or isinstance(use.rule, Lookup):
        return []
    try:
        found = foresee(use, program.parameters, points)
    except NotFactoredError:
        return []
    members = []
    for leaf, layout, pulled in found:
        view = View.whole(leaf, tuple(program.parameters[leaf].shape)).reshape(layout.split)
        if view is None:
            return []
        members.append(Member(use, view, layout, pulled=pulled))
    return members


def _join(
    members: list[Member], scale: tuple[int, int], shape: tuple[int, ...]
) -> list[Product] | None:
    """The uses of one parameter as products that share no entry, or None."""
    groups: dict[_Key, list[Member]] = {}
    for member in members:
        view, layout = member.view, member.layout
        batch, rows, columns = map(view.atoms, layout.sides)
        key = (view.offset, batch, rows, columns)
        mirror = (view.offset, batch, columns, rows)
        swapped = key not in groups and mirror in groups
        group = groups.setdefault(mirror if swapped else key, [])
        group.append(dataclasses.replace(member, swapped=swapped))
    if any(m.pulled for m in members):
        # Terms are of the whole parameter, as all of these read it.
        every = [m for group in groups.values() for m in group]
        if any(m.swapped or m.layout != every[0].layout for m in every):
            return None
        if any(isinstance(m.use.rule, Lookup) for m in every):
            return None
    if len(groups) > 1:
        seen = np.zeros(math.prod(shape), bool)
        for group in groups.values():
            entries = group[0].view.among(seen)
            if entries.any():
                return None
            entries[...] = True
    return [Product(tuple(g), _method(g, *scale), shape) for g in groups.values()]


def _terms(members: Iterable[Member]) -> int:
    return sum(member.pulled.terms for member in members if member.pulled)


def _method(members: list[Member], batch: int, points: int) -> str:
    _, rows, columns = members[0].layout.sizes
    segments = [m.segments(points) for m in members]
    # At each position of each segment.
    positions = sum(m.positions * n for m, n in zip(members, segments, strict=True))
    terms = _terms(members)
    fixed = points if terms else 0
    method = _products.choose(batch, positions, rows, columns, segments=sum(segments), fixed=fixed)
    if any(isinstance(m.use.rule, Lookup) for m in members):
        # A one-hot factor makes the inner products cheap, and the formed gradient sparse.
        return "outer" if method == "outer" else "gram"
    return "gram" if terms and method != "keep" else method
