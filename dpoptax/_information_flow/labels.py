"""Describes the data that a value may depend on, and the effect of marks."""

import dataclasses
import enum
import functools
import operator
from collections.abc import Hashable, Iterable

from dpoptax._information_flow.entry_facts import UNKNOWN_FACTS, EntryFacts
from dpoptax._information_flow.example_axes import ExampleAxes
from dpoptax._support.marks import CLIPPED, EXAMPLES, RELEASE, UNCLIPPED, VOUCHED


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
