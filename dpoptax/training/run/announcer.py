"""Announces slow phases of a run."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from tqdm import tqdm

PATIENCE = 1.0
"""Seconds after which a phase is announced."""


class Announcer:
    """Announces each slow phase of a run once.

    A phase is a context: `with phases("loading data"):`. It is announced after `PATIENCE` seconds.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        """Makes phases for one run. `say` gets the announcements, if given."""
        self._say, self._said = say, set[str]()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Announces phase `name`, which may recur, if the context takes long."""
        timer = threading.Timer(PATIENCE, self._announce, [name])
        timer.daemon = True
        if self._say is not None and name not in self._said:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def announce(self, text: str) -> None:
        """Announces an event that takes no time."""
        if self._say is not None:
            self._say(text)

    def _announce(self, name: str) -> None:
        self._said.add(name)
        self.announce(f"{name} ...")


def say(text: str) -> None:
    """Writes a line to standard error, above a progress bar if any."""
    tqdm.write(f"dpoptax: {text}", file=sys.stderr)
