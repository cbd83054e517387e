"""What a value may tell of, and what marks in a program make of that."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Hashable, Iterable

from dpoptax._information_flow.example_axes import Rows
from dpoptax._information_flow.indices import UNKNOWN, Entries
from dpoptax._information_flow.selections import Selection
from dpoptax._marks import CLIPPED, EXAMPLES, RELEASE, UNCLIPPED, VOUCHED


class Holds(enum.Flag):
    """What a value may tell of."""

    NOTHING = 0
    RELEASED = enum.auto()
    SECRET = enum.auto()  # a noise key, or noise that was drawn
    EXAMPLES = enum.auto()  # private data on their way through a clip
    CLIPPED = enum.auto()  # what one example moves by a bounded amount
    PRIVATE = enum.auto()


DATA = Holds.EXAMPLES | Holds.CLIPPED | Holds.PRIVATE


@dataclasses.dataclass(frozen=True)
class Label:
    """What is known of a value.

    Attributes:
      holds: what it may tell of.
      rows: where the examples are in private data; None: nowhere, each entry may be of several.
        Within a clip it is in their `drawn` what rows are clipped there, and by which one.
      joined: the operation that made it of several, and its line.
      number: of what holds no data: equal for equal values; None where nothing is known.
      entries: how its entries are to each other, of what holds no data.
      apart: the axes of a mesh along which each device may have another.
      selections: those that it tells of.
    """

    holds: Holds = Holds.NOTHING
    rows: Rows | None = None
    joined: str = ""
    number: Hashable = None
    entries: Entries = UNKNOWN
    apart: frozenset[Hashable] = frozenset()
    selections: frozenset[Selection] = frozenset()

    @property
    def has_data(self) -> bool:
        """Whether it holds private data, clipped or not."""
        return bool(self.holds & DATA)


NOTHING = Label()


def either(labels: Iterable[Label]) -> Label:
    """Of a value that may be any of these."""
    labels = tuple(labels)
    holds = functools.reduce(operator.or_, (each.holds for each in labels), Holds.NOTHING)
    apart = frozenset[Hashable]().union(*(each.apart for each in labels))
    selections = frozenset[Selection]().union(*(each.selections for each in labels))
    data = [each for each in labels if each.has_data]
    if not data:
        numbers, entries = {each.number for each in labels}, {each.entries for each in labels}
        return Label(
            holds,
            number=numbers.pop() if len(numbers) == 1 else None,
            entries=entries.pop() if len(entries) == 1 else UNKNOWN,
            apart=apart,
            selections=selections,
        )
    found = {each.rows for each in data}
    joined = next((each.joined for each in data if each.joined), "")
    rows = found.pop() if len(found) == 1 else None
    return Label(holds, rows, joined, apart=apart, selections=selections)


def decided(label: Label, by: Label) -> Label:
    """Of a value that is there if another says so."""
    both = either((label, by))
    if both.has_data:
        return both if by.holds else dataclasses.replace(label, apart=both.apart)
    return dataclasses.replace(
        label, holds=both.holds, apart=both.apart, selections=both.selections
    )


def marked(label: Label, name: str, clip: Hashable) -> Label:
    """Behind a mark, of a clip whose marks have the same `clip`."""
    holds, rows = label.holds, None
    if name == EXAMPLES:
        apart = label.rows is not None and label.rows.leading and not holds & ~Holds.PRIVATE & DATA
        holds = _instead(holds, DATA, Holds.EXAMPLES if apart else Holds.PRIVATE)
        rows = Rows((), (clip, label.rows)) if apart else None
    elif name == CLIPPED:
        own = label.rows is not None and label.rows.drawn[:1] == (clip,)
        bounded = own and not holds & (Holds.PRIVATE | Holds.CLIPPED)
        holds = _instead(holds, DATA, Holds.CLIPPED if bounded else Holds.PRIVATE)
    elif name == UNCLIPPED:
        holds = _instead(holds, DATA, Holds.PRIVATE)
    elif name == VOUCHED:
        holds, rows = _instead(holds, DATA, Holds.EXAMPLES), Rows((), (clip,))
    elif name == RELEASE:
        holds = _instead(holds, Holds.CLIPPED, Holds.RELEASED) & ~Holds.SECRET
    else:
        return label
    return dataclasses.replace(label, holds=holds, rows=rows)


def kind(holds: Holds, in_stage: bool = False) -> str:
    """Returns the kind of a shown value: a secret is private except in a noise stage's state."""
    if holds & DATA:
        return "private"
    if Holds.SECRET in holds:
        return "secret" if in_stage else "private"
    return "released" if Holds.RELEASED in holds else "public"


def _instead(holds: Holds, old: Holds, new: Holds) -> Holds:
    return holds & ~old | new if holds & old else holds
