"""Makes the plan of a program.

Most parameters are used once, as they are. The others take most of the code: parts of parameters,
concatenated, shared and tied ones, values computed from parameters, and gradients that are cheaper
to form than to represent by factors.
"""

import dataclasses
import functools
import itertools
import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from jax import lax

from dpoptax import _losses
from dpoptax._ghost_clipping.plan import Plan, PlannedUse, Product, choose_product_method
from dpoptax._losses.traced_program import Parameter, Program, Use

if TYPE_CHECKING:
    from dpoptax._ghost_clipping.factor_products import Segment
    from dpoptax._losses.rules import FactorLayout
    from dpoptax._losses.views import AxisRuns

# A view's offset in its parameter, and its axes as stacks, rows and columns.
_LayoutKey: TypeAlias = "tuple[int, AxisRuns, AxisRuns, AxisRuns]"


def make_plan(program: Program, examples: int, points: int) -> Plan:
    """Returns the plan for `examples` at `points` gradient points."""
    formed = {i: f"meets data in {', '.join(why)}" for i, why in program.opaque.items()}
    leaf_uses: dict[int, list[PlannedUse]] = {}
    for use in program.uses:
        planned = read_use(use)
        members = _read_concatenated(use) if planned is None else [planned]
        if not members:
            members = _pull_back_use(program, use, points)
        for leaf in use.value.leaves if not members else ():
            formed.setdefault(leaf, f"computed on before it meets data in {use.rule.name}")
        for member in members:
            leaf_uses.setdefault(member.leaf, []).append(member)
    joined = {}
    for leaf, members in leaf_uses.items():
        shape = tuple(program.parameters[leaf].shape)
        found = _join_uses(members, (examples, points), shape)
        if found is None:
            formed.setdefault(leaf, "its uses overlap in different layouts")
        else:
            joined[leaf] = found
    if any(p.method == "keep" for found in joined.values() for p in found):
        _choose_formed(program, joined, formed)
    if any(len(use.value.leaves) > 1 for use in program.uses):
        _form_coupled(program, formed)
    products = [p for leaf, found in joined.items() if leaf not in formed for p in found]
    formed_uses = [u for u in program.uses if u.value.leaves & set(formed)]
    return Plan(tuple(products), formed, tuple(formed_uses))


def _choose_formed(
    program: Program, joined: dict[int, list[Product]], formed: dict[int, str]
) -> None:
    """Moves parameters whose method is "keep" to `formed`.

    All parameters that are used together with a formed parameter are also formed. If these are
    larger, the gradient is formed for the norm but not kept. With fixed terms it is not formed at
    all.
    """
    # Forming the gradient of a use gives those of all its parameters, so they are formed together.
    sizes = [p.size for p in program.parameters]
    kept = {leaf for leaf, found in joined.items() if all(p.method == "keep" for p in found)}
    for leaf, found in joined.items():
        coupled = _find_coupled(program, {leaf}) - kept
        if leaf in kept and sum(sizes[other] for other in coupled) <= sizes[leaf]:
            formed.setdefault(leaf, "")
        else:
            joined[leaf] = [
                dataclasses.replace(p, method="gram" if p.fixed_terms else "form")
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


def read_use(use: Use) -> PlannedUse | None:
    """Returns the parameter of a use with its layout.

    The result is `None` if the used value does more than move or scale entries of one parameter.
    """
    layout, origin = use.rule.layout, use.value.origin
    if isinstance(origin, Parameter):
        return PlannedUse(use, layout, origin.leaf)
    view = _losses.derived_views.find_view(use.value)
    view = None if view is None else view.reshape(layout.split)
    return None if view is None else PlannedUse(use, layout, view.leaf, view)


def _read_concatenated(use: Use) -> list[PlannedUse]:
    """Returns the parameters that were concatenated to the used value, with their layouts.

    The list is empty if the value is not a concatenation of parameters, or if its axis is not one
    of the rows or columns.
    """
    layout, tiles = use.rule.layout, _losses.derived_views.find_tiles(use.value)
    if tiles is None or use.rule.is_lookup:
        return []
    axis, parts = tiles
    first, length = parts[0].shape, sum(part.shape[axis] for part in parts)
    side = layout.rows if axis in layout.rows else layout.columns
    if layout.split != (*first[:axis], length, *first[axis + 1 :]) or axis not in side:
        return []
    ends = itertools.accumulate(part.shape[axis] for part in parts)
    return [
        PlannedUse(
            use,
            dataclasses.replace(layout, split=part.shape),
            part.leaf,
            part,
            functools.partial(_cut, layout, axis, end - part.shape[axis], end),
        )
        for part, end in zip(parts, ends, strict=True)
    ]


def _cut(layout: "FactorLayout", axis: int, start: int, end: int, segment: "Segment") -> "Segment":
    """Returns the factors of the slice of a gradient along one axis of its layout."""
    name = "rows" if axis in layout.rows else "columns"
    side, factor = getattr(layout, name), getattr(segment, name)
    lead, shape = factor.shape[:-1], [layout.split[i] for i in side]
    whole = factor.reshape(*lead, *shape)
    part = lax.slice_in_dim(whole, start, end, axis=len(lead) + side.index(axis))
    return segment._replace(**{name: part.reshape(*lead, -1)})


def _pull_back_use(program: Program, use: Use, points: int) -> list[PlannedUse]:
    """Returns the parameters behind a used value, if gradients can be pulled back."""
    if use.value.scans or use.rule.is_lookup:
        return []
    from dpoptax._ghost_clipping.transformed.point_differences import count_parts

    return [
        PlannedUse(use, layout, leaf, pull_back_counts=counts)
        for leaf, layout, counts in count_parts(use, program.parameters, points)
    ]


def _join_uses(
    members: list[PlannedUse], counts: tuple[int, int], shape: tuple[int, ...]
) -> list[Product] | None:
    """Joins the uses of one parameter to products; `None` if these would overlap.

    `counts` are the numbers of examples and of gradient points.
    """
    if len(members) == 1:
        return [Product(tuple(members), choose_product_method(members, *counts), shape)]
    by_layout: dict[_LayoutKey, list[PlannedUse]] = {}
    # Lookups first: their rows are one-hot, and they are never swapped.
    for member in sorted(members, key=lambda member: not member.use.rule.is_lookup):
        view, layout = member.view, member.layout
        stacks, rows, columns = map(view.runs, layout.sides)
        key = (view.offset, stacks, rows, columns)
        # The gradient of a transposed use is Σ columns ⊗ rows, which joins the others as it is.
        mirror = (view.offset, stacks, columns, rows)
        swapped = key not in by_layout and mirror in by_layout and not member.use.rule.is_lookup
        joined = by_layout.setdefault(mirror if swapped else key, [])
        joined.append(dataclasses.replace(member, swapped=swapped))
    if any(m.pull_back_counts for m in members):
        # A fixed term covers the whole parameter, so all uses must read it in the same layout.
        every = [m for joined in by_layout.values() for m in joined]
        if any(m.swapped or m.layout != every[0].layout for m in every):
            return None
        if any(m.use.rule.is_lookup for m in every):
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
