"""The draws of noise that a program makes, and whether two of them may be of one key."""

import contextlib
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from dpoptax._information_flow.derivations import Derivations, Place


class _Draw(NamedTuple):
    """A draw.

    Attributes:
      key: the number of its key, or of an array of keys.
      place: where it is.
      single: whether it is of a key alone.
    """

    key: Hashable
    place: Place
    single: bool


class Draws:
    """The draws so far, but for those that are followed before it is known what loops carry."""

    def __init__(self, derivations: Derivations) -> None:
        self._derivations = derivations
        self._draws: list[_Draw] = []
        self._branches: set[int] = set()
        self._judged = True

    def add_branch(self, branch: object) -> None:
        """A program that runs where another one of a choice does not."""
        self._branches.add(id(branch))

    def again(self, key: Hashable, place: Place, *, single: bool) -> bool:
        """Whether noise may have been drawn by a key elsewhere already; it has been here, then."""
        if not self._judged:
            return False
        found = any(
            self._both_run(place, draw.place)
            and not self._derivations.differ(
                key, draw.key, single=single and draw.single, drawn=(place, draw.place)
            )
            for draw in self._draws
        )
        self._draws.append(_Draw(key, place, single))
        return found

    @contextlib.contextmanager
    def unjudged(self) -> Iterator[bool]:
        """In which no draw counts; whether any does around it."""
        before, self._judged = self._judged, False
        yield before
        self._judged = before

    def count(self) -> int:
        """How many there are."""
        return len(self._draws)

    def forget(self, count: int) -> None:
        """All but the first so many."""
        del self._draws[count:]

    def _both_run(self, here: Place, there: Place) -> bool:
        """Whether these are two places, and not in two branches of one choice."""
        pairs = zip(here, there, strict=False)
        apart = next(({one, another} for one, another in pairs if one != another), None)
        return apart is not None and not apart <= self._branches
