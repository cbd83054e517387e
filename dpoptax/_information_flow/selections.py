"""Tracks selected rows, and whether a noise stage counts their release."""

from collections.abc import Hashable, Iterable
from typing import TypeAlias

from dpoptax._information_flow.derivations import Derivations, ProgramPath

Selection: TypeAlias = tuple[Hashable, ProgramPath]
"""The number of a release's key, and the loops and branches around the selection."""


class RowSelections:
    """Records the selections so far, and the releases that were counted.

    Both are identified by the key that drew noise last at their place. The key of a selection is
    derived from the key of its release.
    """

    def __init__(self, derivations: Derivations) -> None:
        self._derivations = derivations
        self._keys: dict[ProgramPath, Hashable] = {}
        self._lines: dict[Selection, str] = {}
        self._counted: set[Selection] = set()

    def draw(self, place: ProgramPath, key: Hashable) -> None:
        """Records that noise is drawn at a place, by the key with this number."""
        self._keys[place] = key

    def select(self, place: ProgramPath, around: ProgramPath, line: str) -> Selection:
        """Returns the selection by the noise drawn there, within these loops and branches."""
        selection = self._derivations.source(self._keys.get(place)), around
        self._lines.setdefault(selection, line)
        return selection

    def count(self, place: ProgramPath, around: ProgramPath) -> None:
        """Records that the release with the noise drawn there is counted."""
        key = self._derivations.source_array(self._keys.get(place))
        if key is not None:
            self._counted.add((key, around))

    def are_counted(self, selections: Iterable[Selection]) -> bool:
        """Returns whether each selection belongs to a release that is surely counted."""
        return all(map(self._is_counted, selections))

    def _is_counted(self, selection: Selection) -> bool:
        # A count outside of some of these loops and branches runs whenever the selection does.
        key, around = selection
        return any((key, around[:n]) in self._counted for n in range(len(around) + 1))

    @property
    def uncounted(self) -> dict[str, None]:
        """The lines of uncounted selections, each once, in order."""
        lines = self._lines.items()
        return {line: None for selection, line in lines if not self._is_counted(selection)}
