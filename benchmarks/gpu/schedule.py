"""Runs tasks within a time limit and writes each result at once."""

import concurrent.futures
import json
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A part of the run.

    Attributes:
      name: its key in the results.
      seconds: how long it is expected to take.
      function: returns its result, for JSON.
    """

    name: str
    seconds: float
    function: Callable[[], Any]


class Schedule:
    """Runs tasks until the time is over; keeps results in a file.

    A task is skipped if its expected time exceeds the time left. The expected time of a section is
    corrected by how long its earlier tasks took. A task that raises an error is recorded with the
    error.

    Args:
      folder: where `results.json` and `log.txt` are written.
      minutes: the time limit.
    """

    def __init__(self, folder: Path, minutes: float):
        folder.mkdir(parents=True, exist_ok=True)
        self._json, self._log = folder / "results.json", folder / "log.txt"
        self._start, self._limit = time.monotonic(), 60.0 * minutes
        self._lock = threading.RLock()
        self._log.write_text("")
        self.results: dict[str, Any] = {}

    def elapsed(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self._start

    def left(self) -> float:
        """Returns the seconds that are left."""
        return self._limit - self.elapsed()

    def say(self, text: str) -> None:
        """Prints and logs a line with the elapsed time."""
        line = f"[{self.elapsed():6.1f} s] {text}"
        with self._lock:
            print(line, flush=True)
            with self._log.open("a") as file:
                file.write(line + "\n")

    def failed(self, name: str, error: Exception) -> str:
        """Prints and returns the beginning of an error; logs its traceback."""
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        text = f"{type(error).__name__}: {lines[0][:300]}"
        self.say(f"  ERROR in {name}: {text}")
        with self._lock, self._log.open("a") as file:
            file.writelines(traceback.format_exception(error))
        return text

    def record(self, section: str, name: str, result: Any) -> None:
        """Adds a result and writes all results."""
        with self._lock:
            self.results.setdefault(section, {})[name] = result
            temporary = self._json.with_suffix(".part")
            temporary.write_text(json.dumps(self.results, indent=1))
            temporary.replace(self._json)

    def run(
        self,
        section: str,
        tasks: Sequence[Task],
        *,
        describe: Callable[[Any], str] = str,
        threads: int = 1,
        budget: float | None = None,
    ) -> None:
        """Runs the tasks in order, `threads` at a time.

        Args:
          section: the key of their results.
          tasks: the tasks.
          describe: returns a line about a result.
          threads: number of tasks that run at once.
          budget: seconds for this section; by default all that are left.
        """
        ends = self.elapsed() + min(self.left(), self.left() if budget is None else budget)
        factors: list[float] = []

        def run_one(task: Task) -> None:
            with self._lock:
                expected = task.seconds * (statistics.median(factors[-5:]) if factors else 1.0)
            left = ends - self.elapsed()
            if expected > left:
                reason = f"needs about {expected:.0f} s, {max(0.0, left):.0f} s are left"
                self.record(section, task.name, {"skipped": reason})
                return self.say(f"{section}, {task.name}: skipped, {reason}")
            start = time.monotonic()
            try:
                result = task.function()
                text = describe(result)
            except Exception as error:  # The run goes on after any error of any library.
                result = {"error": self.failed(task.name, error)}
                text = "failed"
            seconds = time.monotonic() - start
            factors.append(seconds / task.seconds)
            self.record(section, task.name, result)
            self.say(f"{section}, {task.name}: {text} ({seconds:.1f} s)")

        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            list(pool.map(run_one, tasks))

    def stop_after(self, seconds: float) -> threading.Timer:
        """Ends the process if it runs on `seconds` after its time; the files are complete."""

        def stop() -> None:
            self.say("the time is over: the run ends in the middle of a task")
            os._exit(0)

        timer = threading.Timer(max(0.0, self.left() + seconds), stop)
        timer.daemon = True
        timer.start()
        return timer
