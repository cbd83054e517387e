"""What is known of values where a program runs several times: in turns of a loop, or on devices."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from jax.extend.core import JaxprEqn

from dpoptax._information_flow.derivations import Derivations, Loop
from dpoptax._information_flow.example_axes import Rows, Turn, names
from dpoptax._information_flow.indices import UNKNOWN
from dpoptax._information_flow.labels import Label, either

Moving = Callable[[Rows, Turn], Rows | None]
"""What becomes of rows on the way into a turn, or out of it."""


# What makes of all devices' values one that is the same on each.
_ALIKE = {
    *("psum", "psum_invariant", "pmax", "pmin"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
}


class Repeats:
    """Labels on their way into the turns of one program, from turn to turn, and out of them.

    A number stands for equal values within a turn, and rows for examples chosen there: outside,
    and in another turn, the same would be others.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        read: Sequence[Label],
        name: str,
        derivations: Derivations,
        run: tuple[Hashable, ...],
    ) -> None:
        self._turn, self._name = Turn(id(eqn)), name
        self._derivations, self._run = derivations, run
        self._first: dict[int, Hashable] = {}
        self._drawn = {(), *(label.rows.drawn for label in read if label.rows)}

    def inner(self, label: Label, moving: Moving, place: int, *, other: bool = False) -> Label:
        """Of what one turn gets, or an `other` one, of a value from outside."""
        if label.has_data:
            return self._with_rows(label, label.rows and moving(label.rows, self._turn))
        parts = [self._numbered(name, place, label.number) for name in ("part", "other part")]
        if label.entries.distinct:
            self._derivations.add_unlike(*parts)
        return dataclasses.replace(label, number=parts[other])

    def outer(self, label: Label, moving: Moving, place: int) -> Label:
        """Of a value outside, of what all turns made."""
        if label.has_data:
            moved = label.rows and moving(label.rows, self._turn)
            return self._with_rows(label, moved if self._lasts(moved) else None)
        number = self._numbered("whole", place)
        return dataclasses.replace(label, number=number, entries=UNKNOWN)

    def carried(self, before: Sequence[Label], after: Sequence[Label], turns: float) -> list[Label]:
        """Of what a turn gets from the one before, or from outside, in a loop of so many."""
        self._keep(before, after, turns)
        found = []
        for place, (old, new) in enumerate(zip(self._one(before), self._one(after), strict=True)):
            both = either((old, new))
            if both.has_data:
                both = self._with_rows(both, both.rows if self._lasts(both.rows) else None)
            elif old.number != new.number:
                both = dataclasses.replace(both, number=self._numbered("carried", place))
            found.append(both)
        return found

    def _keep(self, before: Sequence[Label], after: Sequence[Label], turns: float) -> None:
        """What a turn made of what it got."""
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            carried, later, last = (
                self._numbered(name, place) for name in ("carried", "carried on", "last")
            )
            if old.number == later:
                self._derivations.add_later(later, new.number)
            elif old.number == carried:
                loop = Loop(carried, later, last, self._first.get(place), new.number, turns)
                self._derivations.add_loop(loop)
            else:
                self._first[place] = old.number

    def other(self, carry: Sequence[Label]) -> list[Label]:
        """Of what another turn gets from the one before it: what no turn changes is the same."""
        return self._renamed(carry, "carried", "carried on")

    def _one(self, carry: Sequence[Label]) -> list[Label]:
        """Of what that turn got, as of any."""
        return self._renamed(carry, "carried on", "carried")

    def ended(self, carry: Sequence[Label]) -> list[Label]:
        """Of what the last turn leaves."""
        return self._renamed(carry, "carried", "last")

    def _renamed(self, carry: Sequence[Label], old: str, new: str) -> list[Label]:
        return [
            dataclasses.replace(label, number=self._numbered(new, place))
            if label.number == self._numbered(old, place)
            else label
            for place, label in enumerate(carry)
        ]

    def _numbered(self, *what: Hashable) -> int:
        return self._derivations.number(self._run, *what)

    def _lasts(self, rows: Rows | None) -> bool:
        """Whether rows mean the same in all turns."""
        if rows is None or rows.drawn not in self._drawn:
            return False
        return not any(isinstance(d, Turn) and d.of == self._turn.of for d in rows.digits)

    def _with_rows(self, label: Label, rows: Rows | None) -> Label:
        joined = label.joined if rows or label.joined else self._name
        return dataclasses.replace(label, rows=rows, joined=joined)


def manual(eqn: JaxprEqn) -> frozenset[Hashable]:
    """The axes of a mesh that a `jax.shard_map` is over."""
    axes: frozenset[Hashable] = eqn.params["newly_manual_axes"]
    return axes


def apart_behind(eqn: JaxprEqn, before: frozenset[Hashable]) -> frozenset[Hashable]:
    """The axes of a mesh along which devices may have other results; `before`, other operands."""
    over = names(eqn.params.get("axes" if "axes" in eqn.params else "axis_name"))
    if eqn.primitive.name == "axis_index":
        return before.union(over)
    same = eqn.primitive.name in _ALIKE and eqn.params.get("axis_index_groups") is None
    return before.difference(over) if same else before
