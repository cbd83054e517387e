"""Passes labels into and out of loops and devices."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence

from jax.extend.core import JaxprEqn

from dpoptax._information_flow.derivations import Derivations, LoopCarry
from dpoptax._information_flow.entry_facts import UNKNOWN_FACTS
from dpoptax._information_flow.example_axes import ExampleAxes, LoopTurn, mesh_axes
from dpoptax._information_flow.labels import Label, join_labels

AxesMove = Callable[[ExampleAxes, LoopTurn], ExampleAxes | None]
"""Maps example axes on the way into a turn of a loop, or out of it."""


# Collectives whose results are equal on all devices.
_COLLECTIVES = {
    *("psum", "psum_invariant", "pmax", "pmin"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
}


class LoopLabels:
    """Maps the labels of a loop: into a turn, between turns, and out of the loop.

    A number represents equal values within a turn, and example axes represent the examples of that
    turn. Outside of the turn, and in another turn, they would represent other values and examples.
    """

    def __init__(
        self,
        eqn: JaxprEqn,
        read: Sequence[Label],
        name: str,
        derivations: Derivations,
        run: tuple[Hashable, ...],
    ) -> None:
        self._turn, self._name = LoopTurn(id(eqn)), name
        self._derivations, self._run = derivations, run
        self._first: dict[int, Hashable] = {}
        self._drawn = {(), *(label.rows.drawn for label in read if label.rows)}

    def enter(self, label: Label, moving: AxesMove, place: int, *, other: bool = False) -> Label:
        """Returns the label, inside a turn or an `other` turn, of a value from outside."""
        if label.has_data:
            return self._set_rows(label, label.rows and moving(label.rows, self._turn))
        # Any turn that is followed gets the first number, and a second turn the other one.
        parts = [self._numbered(name, place, label.number) for name in ("part", "other part")]
        # Two slices of distinct entries share none.
        if label.entries.distinct:
            self._derivations.add_disjoint(*parts)
        return dataclasses.replace(label, number=parts[other])

    def leave(self, label: Label, moving: AxesMove, place: int) -> Label:
        """Returns the label, outside of the loop, of the stacked results of all turns."""
        if label.has_data:
            moved = label.rows and moving(label.rows, self._turn)
            return self._set_rows(label, moved if self._is_lasting(moved) else None)
        # The stack has other values than any turn.
        number = self._numbered("whole", place)
        return dataclasses.replace(label, number=number, entries=UNKNOWN_FACTS)

    def carry(self, before: Sequence[Label], after: Sequence[Label], turns: float) -> list[Label]:
        """Returns the labels of a turn's carry, from outside or from the previous turn."""
        self._record(before, after, turns)
        found = []
        for place, (old, new) in enumerate(
            zip(self._first_turn(before), self._first_turn(after), strict=True)
        ):
            both = join_labels((old, new))
            if both.has_data:
                both = self._set_rows(both, both.rows if self._is_lasting(both.rows) else None)
            # A value that a turn changes gets a number that holds in any turn.
            elif old.number != new.number:
                both = dataclasses.replace(both, number=self._numbered("carried", place))
            found.append(both)
        return found

    def _record(self, before: Sequence[Label], after: Sequence[Label], turns: float) -> None:
        """Records the result that a turn computes from each carried value."""
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            carried, later, last = (
                self._numbered(name, place) for name in ("carried", "carried on", "last")
            )
            if old.number == later:  # followed as another turn
                self._derivations.add_later(later, new.number)
            elif old.number == carried:  # followed as any turn
                loop = LoopCarry(carried, later, last, self._first.get(place), new.number, turns)
                self._derivations.add_loop(loop)
            else:  # followed as the first turn
                self._first[place] = old.number

    def next_turn(self, carry: Sequence[Label]) -> list[Label]:
        """Returns the labels of the carry in another turn; unchanged values stay equal."""
        return self._renamed(carry, "carried", "carried on")

    def _first_turn(self, carry: Sequence[Label]) -> list[Label]:
        """Returns the labels of the carry with the numbers of the first followed turn."""
        return self._renamed(carry, "carried on", "carried")

    def last_turn(self, carry: Sequence[Label]) -> list[Label]:
        """Returns the labels of the carry after the last turn."""
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

    def _is_lasting(self, rows: ExampleAxes | None) -> bool:
        """Returns whether example axes mean the same in all turns."""
        # A selection inside a turn may select other examples in each turn.
        if rows is None or rows.drawn not in self._drawn:
            return False
        # Rows of one turn are other examples in the next turn.
        return not any(isinstance(d, LoopTurn) and d.loop == self._turn.loop for d in rows.digits)

    def _set_rows(self, label: Label, rows: ExampleAxes | None) -> Label:
        joined = label.joined if rows or label.joined else self._name
        return dataclasses.replace(label, rows=rows, joined=joined)


def manual_axes(eqn: JaxprEqn) -> frozenset[Hashable]:
    """Returns the mesh axes that a `jax.shard_map` maps over."""
    axes: frozenset[Hashable] = eqn.params["newly_manual_axes"]
    return axes


def varying_axes(eqn: JaxprEqn, before: frozenset[Hashable]) -> frozenset[Hashable]:
    """Returns the mesh axes along which devices may have different results.

    `before` holds those of the operands.
    """
    over = mesh_axes(eqn.params.get("axes" if "axes" in eqn.params else "axis_name"))
    if eqn.primitive.name == "axis_index":
        return before.union(over)
    same = eqn.primitive.name in _COLLECTIVES and eqn.params.get("axis_index_groups") is None
    return before.difference(over) if same else before
