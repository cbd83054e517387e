"""Decides, parameter by parameter, how the norm and the sum of its gradients are computed."""

import dataclasses
from typing import Any

from dpoptax import _products
from dpoptax._tracing import Program, Use
from dpoptax._uses import Lookup
from dpoptax._views import Atoms, View

_Key = tuple[int, Atoms, Atoms, Atoms]


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """A use in a product; `swapped` where its rows are the product's columns."""

    use: Use
    swapped: bool
    scale: float


@dataclasses.dataclass(frozen=True, eq=False)
class Product:
    """Uses of one parameter (or of one slice of it), read in one layout: joined along T."""

    leaf: int
    members: tuple[Member, ...]
    method: str
    view: View  # cut by the layout of the first member
    shape: tuple[int, ...]  # of the parameter

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.members[0].use.layout.sizes


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is done for each parameter.

    Attributes:
      products: gradients that stay products of factors.
      formed: parameters whose per-example gradients are formed, and why.
      uses: the uses that reach formed parameters.
    """

    products: tuple[Product, ...]
    formed: dict[int, str]
    uses: tuple[Use, ...]


def make_plan(program: Program, batch: int, points: int) -> Plan:
    """Plans for `batch` examples and `points` gradient points (a tangent is one more)."""
    formed = {i: f"meets data in {', '.join(why)}" for i, why in program.opaque.items()}
    by_leaf: dict[int, list[Use]] = {}
    for use in program.uses:
        if use.value.view is None:
            for leaf in use.value.leaves:
                formed.setdefault(leaf, f"computed on before it meets data in {use.rule.name}")
        else:
            by_leaf.setdefault(use.value.view.leaf, []).append(use)
    products: list[Product] = []
    for leaf, uses in by_leaf.items():
        if leaf in formed:
            continue
        joined = _join(leaf, uses, (batch, points), tuple(program.parameters[leaf].shape))
        if joined is None:
            formed[leaf] = "its uses overlap in different layouts"
        else:
            products += joined
    rest = [u for u in program.uses if u.value.leaves & set(formed)]
    return Plan(tuple(products), formed, tuple(rest))


def _join(
    leaf: int, uses: list[Use], scale: tuple[int, int], shape: tuple[int, ...]
) -> list[Product] | None:
    """The uses of one parameter as products that share no entry, or None."""
    groups: dict[_Key, list[Member]] = {}
    views: dict[_Key, View] = {}
    for use in uses:
        view, layout = use.value.view, use.layout
        cut = view.reshape(layout.split) if view is not None else None
        if cut is None:
            return None
        parts = [cut.atoms(a) for a in (layout.batch, layout.rows, layout.columns)]
        key = (cut.offset, parts[0], parts[1], parts[2])
        mirror = (cut.offset, parts[0], parts[2], parts[1])
        swapped = key not in groups and mirror in groups
        key = mirror if swapped else key
        views.setdefault(key, cut)
        groups.setdefault(key, []).append(Member(use, swapped, cut.scale / views[key].scale))
    if len(groups) > 1:
        entries = [set(views[key].entries().tolist()) for key in groups]
        if len(set().union(*entries)) < sum(map(len, entries)):
            return None
    return [
        Product(leaf, tuple(members), _method(members, *scale), views[key], shape)
        for key, members in groups.items()
    ]


def _method(members: list[Member], batch: int, points: int) -> str:
    _, rows, columns = members[0].use.layout.sizes
    single = len(members) == 1 and (points == 1 or not members[0].use.touched)
    positions = sum(m.use.positions * segments_of(m.use, points) for m in members)
    method = _products.choose(batch, positions, rows, columns, single=single)
    if any(isinstance(m.use.rule, Lookup) for m in members):
        # A one-hot factor makes the inner products cheap, and the formed gradient sparse.
        return "outer" if method == "outer" else "gram"
    return method


def segments_of(use: Use, points: int) -> int:
    """How many segments a use gives: operands that no point changes are shared by all."""
    return points if use.touched else 1


def describe_uses(uses: Any) -> str:
    """The operations of `uses`, counted."""
    names: dict[str, int] = {}
    for use in uses:
        names[use.rule.name] = names.get(use.rule.name, 0) + 1
    return ", ".join(name if n == 1 else f"{n} × {name}" for name, n in names.items())
