"""Records the noise draws of a program: two by one key."""

import contextlib
from collections.abc import Hashable, Iterator

from dpoptax._information_flow.derivations import Derivations, ProgramPath


class NoiseDraws:
    """Records the draws so far.

    Draws are not recorded while a loop is followed to find its carry.
    """

    def __init__(self, derivations: Derivations) -> None:
        self._derivations = derivations
        # For each draw, the number of its key, or of an array of keys, its place in the program,
        # and whether it uses a single key.
        self._draws: list[tuple[Hashable, ProgramPath, bool]] = []
        self._branches: set[int] = set()
        self._judged = True

    def add_branch(self, branch: object) -> None:
        """Records a program that runs only if another branch of the same choice does not."""
        self._branches.add(id(branch))

    def repeats(self, key: Hashable, place: ProgramPath, *, single: bool) -> bool:
        """Records a draw, and returns whether its key may have drawn noise elsewhere."""
        if not self._judged:
            return False
        found = any(
            self._both_run(place, there)
            and not self._derivations.differ(
                key, other, single=single and alone, reached=(place, there)
            )
            for other, there, alone in self._draws
        )
        self._draws.append((key, place, single))
        return found

    @contextlib.contextmanager
    def suspended(self) -> Iterator[bool]:
        """Suspends recording; yields whether draws were recorded before."""
        before, self._judged = self._judged, False
        yield before
        self._judged = before

    def count(self) -> int:
        """Returns the number of recorded draws."""
        return len(self._draws)

    def forget(self, count: int) -> None:
        """Removes all draws except the first `count`."""
        del self._draws[count:]

    def _both_run(self, here: ProgramPath, there: ProgramPath) -> bool:
        """Returns whether two places differ and are not in two branches of one choice."""
        # Where the two paths part, two branches of one choice exclude each other. Equal paths are
        # one draw: `LabelFollower` follows a second turn of a loop under another path.
        pairs = zip(here, there, strict=False)
        apart = next(({one, another} for one, another in pairs if one != another), None)
        return apart is not None and not apart <= self._branches
