"""Measures the wall time of a run's phases and names those that take longer than a second."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

PATIENCE = 1.0
"""Seconds without a sign of life after which a phase is named."""

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
"""Messages by phase. A progress bar shows the others, such as steps."""


class Phases:
    """The wall time of a run by phase. Time is counted for the innermost phase only.

    A phase is a context: `with phases("data"): ...`. One that lasts longer than `PATIENCE` is
    named, once a run, by `say`.

    Attributes:
        first_step: Seconds from the beginning until the first step was finished; None before.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        """Begins; `say` gets a line, None: nothing is said."""
        self._say, self._said = say, set[str]()
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._begun = self._since = time.perf_counter()
        self.first_step: float | None = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The phase `name`, for as long as the context lasts; it may come again."""
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
        """Marks that a step was finished; the first one counts."""
        if self.first_step is None:
            self.first_step = time.perf_counter() - self._begun

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase so far, and of "other", outside all phases."""
        self._turn()
        return {name: round(spent, 4) for name, spent in self._seconds.items()}

    def _turn(self) -> None:
        now = time.perf_counter()
        name = self._stack[-1] if self._stack else "other"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def _announce(self, name: str) -> None:
        # A phase that is paused by one inside it is not what keeps the user waiting.
        say = self._say
        if say is not None and name not in self._said and name in self._stack[-1:]:
            self._said.add(name)
            say(f"{_SAYS[name]} ...")


def say(text: str) -> None:
    """Writes a line to standard error, above a progress bar if there is one."""
    tqdm.write(f"dpoptax: {text}", file=sys.stderr)
