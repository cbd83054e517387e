"""What is drawn for a release ahead of the rest, and whether the rest is released and counted."""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

from dpoptax._information_flow.derivations import Derivations, ProgramPath

Selection: TypeAlias = tuple[Hashable, ProgramPath]
"""The number of the key of a release, and the loops and branches that a part of it is drawn in."""


class RowSelections:
    """Those so far, and the releases that were counted.

    Both are told by the key that noise was drawn by last at their place: that of the release is
    what the key of a selection is derived from.
    """

    def __init__(self, derivations: Derivations) -> None:
        self._derivations = derivations
        self._keys: dict[ProgramPath, Hashable] = {}
        self._lines: dict[Selection, str] = {}
        self._counted: set[Selection] = set()

    def draw(self, place: ProgramPath, key: Hashable) -> None:
        """That noise is drawn at a place, by the key of this number."""
        self._keys[place] = key

    def select(self, place: ProgramPath, around: ProgramPath, line: str) -> Selection:
        """The selection by the noise drawn there, within such loops and branches."""
        selection = self._derivations.source(self._keys.get(place)), around
        self._lines.setdefault(selection, line)
        return selection

    def count(self, place: ProgramPath, around: ProgramPath) -> None:
        """That the release with the noise drawn there is counted."""
        key = self._derivations.source_array(self._keys.get(place))
        if key is not None:
            self._counted.add((key, around))

    def are_counted(self, selections: Iterable[Selection]) -> bool:
        """Whether each is part of a release that is counted whenever it is drawn."""
        return all(map(self._is_counted, selections))

    def _is_counted(self, selection: Selection) -> bool:
        key, around = selection
        return any((key, around[:n]) in self._counted for n in range(len(around) + 1))

    @property
    def uncounted(self) -> dict[str, None]:
        """The lines of the others, each once, in order."""
        lines = self._lines.items()
        return {line: None for selection, line in lines if not self._is_counted(selection)}
