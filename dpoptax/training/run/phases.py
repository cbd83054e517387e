"""Measures the wall time of a run's phases and announces slow ones."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

PATIENCE = 1.0
"""Seconds after which a phase is announced."""

_SAYS = {
    "devices": "waiting for devices",
    "data": "loading data",
    "accounting": "computing noise and ε",
    "init": "initializing parameters and optimizer",
    "compile": "compiling the training step",
    "evaluation": "evaluating",
    "checkpoints": "waiting for a checkpoint",
    "plan": "computing the cost of the run",
    "files": "writing parameters and figures",
}
"""Messages by phase. A progress bar shows other phases, such as steps."""


class Phases:
    """Measures the wall time of a run by phase.

    Time counts for the innermost phase only. A phase is a context: `with phases("data"): ...`. A
    phase longer than `PATIENCE` is announced once per run.

    Attributes:
        first_step: Seconds until the first step was finished, or None before that.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        """Starts the clock. `say` gets the announcements, if given."""
        self._say, self._said = say, set[str]()
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._begun = self._since = time.perf_counter()
        self.first_step: float | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Counts the time in the context for phase `name`, which may recur."""
        self._turn()
        self._stack.append(name)
        timer = None
        if self._say is not None and name in _SAYS and name not in self._said:
            timer = threading.Timer(PATIENCE, self._announce, [name])
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            self._turn()
            self._stack.pop()

    def stepped(self) -> None:
        """Records the time of the first finished step."""
        if self.first_step is None:
            self.first_step = time.perf_counter() - self._begun

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by phase so far, with "other" for time outside phases."""
        self._turn()
        return {name: round(spent, 4) for name, spent in self._seconds.items()}

    def _turn(self) -> None:
        now = time.perf_counter()
        name = self._stack[-1] if self._stack else "other"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def _announce(self, name: str) -> None:
        # A phase that is paused by a nested one is not announced.
        say = self._say
        if say is not None and name not in self._said and name in self._stack[-1:]:
            self._said.add(name)
            say(f"{_SAYS[name]} ...")


def say(text: str) -> None:
    """Writes a line to standard error, above a progress bar if any."""
    tqdm.write(f"dpoptax: {text}", file=sys.stderr)
