"""Describes the data that a value may depend on, and the effects of marks, loops and devices."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence

from jax.extend.core import JaxprEqn

from dpoptax._information_flow.derivations import Derivations, LoopCarry
from dpoptax._information_flow.entry_facts import UNKNOWN_FACTS, EntryFacts
from dpoptax._information_flow.example_axes import ExampleAxes, LoopTurn
from dpoptax._rounding.device_sums import names_of
from dpoptax._support.marks import CLIPPED, EXAMPLES, RELEASE, UNCLIPPED, VOUCHED

AxesMove = Callable[[ExampleAxes, LoopTurn], ExampleAxes | None]
"""Maps example axes on the way into a turn of a loop, or out of it."""


# Collectives whose results are equal on all devices.
_COLLECTIVES = {
    *("psum", "psum_invariant", "pmax", "pmin"),
    *("all_gather", "all_gather_invariant", "all_gather_reduced"),
}


class Content(enum.Flag):
    """Lists the kinds of data that a value may depend on."""

    NOTHING = 0
    RELEASED = enum.auto()
    SECRET = enum.auto()  # a noise key, or drawn noise
    EXAMPLES = enum.auto()  # private data on the way through a clip
    CLIPPED = enum.auto()  # one example changes it by a bounded amount
    PRIVATE = enum.auto()
    REFERENCE = enum.auto()  # a `jax.Ref`, or a value that was read from one


PRIVATE_DATA = Content.EXAMPLES | Content.CLIPPED | Content.PRIVATE


@dataclasses.dataclass(frozen=True)
class Label:
    """Holds everything that is known about a value.

    Attributes:
      holds: the kinds of data that it may depend on.
      rows: where the examples are in private data; `None` if an entry may depend on several. Within
        a clip, its `drawn` names the clip and the rows that are clipped.
      joined: the operation that combined examples, and its line.
      left: the line where private data left the path to the release.
      number: for values without data, equal for equal values; `None` if nothing is known.
      entries: for values without data, how the entries relate to each other.
      varying: the mesh axes along which devices may have different values.
    """

    holds: Content = Content.NOTHING
    rows: ExampleAxes | None = None
    joined: str = ""
    left: str = ""
    number: Hashable = None
    entries: EntryFacts = UNKNOWN_FACTS
    varying: frozenset[Hashable] = frozenset()

    @property
    def has_data(self) -> bool:
        """True if the value depends on private data, clipped or not."""
        return bool(self.holds.value & PRIVATE_DATA.value)  # `&` of flags is slow


EMPTY_LABEL = Label()


def join_labels(labels: Iterable[Label]) -> Label:
    """Returns the label of a value that may be any of these."""
    labels = tuple(labels)
    holds = functools.reduce(operator.or_, {each.holds for each in labels}, Content.NOTHING)
    varying = frozenset[Hashable]().union(*(each.varying for each in labels))
    data = [each for each in labels if each.has_data]
    if not data:
        numbers, entries = {each.number for each in labels}, {each.entries for each in labels}
        return Label(
            holds,
            number=numbers.pop() if len(numbers) == 1 else None,
            entries=entries.pop() if len(entries) == 1 else UNKNOWN_FACTS,
            varying=varying,
        )
    found = {each.rows for each in data}
    joined = next((each.joined for each in data if each.joined), "")
    rows = found.pop() if len(found) == 1 else None
    left = next((each.left for each in data if each.left), "")
    return Label(holds, rows, joined, left, varying=varying)


def condition_label(label: Label, by: Label) -> Label:
    """Returns the label of a value that exists only under a condition."""
    if not (by.holds or by.varying):
        return label
    both = join_labels((label, by))
    if both.has_data:
        return both if by.holds else dataclasses.replace(label, varying=both.varying)
    return dataclasses.replace(label, holds=both.holds, varying=both.varying)


def apply_mark(label: Label, name: str, clip: Hashable) -> Label:
    """Returns the label after a mark; marks of one clip share `clip`."""
    holds, rows = label.holds, None
    if name == EXAMPLES:
        separate = (
            label.rows is not None
            and label.rows.is_leading
            # Data that is in a clip already, or clipped, must not enter another one.
            and not holds & ~Content.PRIVATE & PRIVATE_DATA
        )
        holds = _replace(holds, PRIVATE_DATA, Content.EXAMPLES if separate else Content.PRIVATE)
        # Within the clip, rows are not followed: `digits` is empty, and `drawn` names the clip.
        rows = ExampleAxes((), (clip, label.rows)) if separate else None
    elif name == CLIPPED:
        # All examples must have come in by this clip's entry, not around it or by another clip.
        own = label.rows is not None and label.rows.drawn[:1] == (clip,)
        bounded = own and not holds & (Content.PRIVATE | Content.CLIPPED)
        holds = _replace(holds, PRIVATE_DATA, Content.CLIPPED if bounded else Content.PRIVATE)
    elif name == UNCLIPPED:
        holds = _replace(holds, PRIVATE_DATA, Content.PRIVATE)
    elif name == VOUCHED:
        holds, rows = (_replace(holds, PRIVATE_DATA, Content.EXAMPLES), ExampleAxes((), (clip,)))
    elif name == RELEASE:
        # Unclipped data stays private: noise only hides data that a clip has bounded.
        holds = _replace(holds, Content.CLIPPED, Content.RELEASED) & ~Content.SECRET
    else:
        return label
    left = label.left if holds & PRIVATE_DATA else ""
    return dataclasses.replace(label, holds=holds, rows=rows, left=left)


def shown_kind(holds: Content, in_stage: bool = False) -> str:
    """Returns the kind of a shown value.

    A secret is private, except in the state of a noise stage.
    """
    if holds & PRIVATE_DATA:
        return "private"
    if Content.SECRET in holds:
        return "secret" if in_stage else "private"
    # A write to a reference counts as shown, so a reference holds only releases.
    return "released" if holds & (Content.RELEASED | Content.REFERENCE) else "public"


def _replace(holds: Content, old: Content, new: Content) -> Content:
    return holds & ~old | new if holds & old else holds


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


def varying_axes(eqn: JaxprEqn, before: frozenset[Hashable]) -> frozenset[Hashable]:
    """Returns the mesh axes along which devices may have different results.

    `before` holds those of the operands.
    """
    over = names_of(eqn.params.get("axes" if "axes" in eqn.params else "axis_name"))
    if eqn.primitive.name == "axis_index":
        return before.union(over)
    same = eqn.primitive.name in _COLLECTIVES and eqn.params.get("axis_index_groups") is None
    return before.difference(over) if same else before
