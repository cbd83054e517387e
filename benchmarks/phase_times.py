"""Measures the wall time of a run of the trainer by phase, in this process."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from dpoptax.training import loop
from dpoptax.training.bars import Bar
from dpoptax.training.run.course import Course
from dpoptax.training.run.phases import Phases
from dpoptax.training.run.privacy import RunPlan


class PhaseTimes(Phases):
    """Measures the time of each phase besides announcing it.

    Time counts for the innermost phase only.

    Attributes:
        newest: The times of the newest run of this process.
        first_step: Seconds until the first step was finished, or None before that.
        first_processor: Processor seconds of all threads of this process until then.
    """

    newest: "PhaseTimes | None" = None

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        super().__init__(say)
        PhaseTimes.newest = self
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._begun = self._since = time.perf_counter()
        self.first_step: float | None = None
        self.first_processor = 0.0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with super().__call__(name), self.timed(name):
            yield

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Counts the time in the context for phase `name`, which may recur."""
        self._turn()
        self._stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self._stack.pop()

    def stepped(self) -> None:
        """Notes the time of the first finished step."""
        if self.first_step is None:
            self.first_step = time.perf_counter() - self._begun
            self.first_processor = time.process_time()

    def seconds(self) -> dict[str, float]:
        """Returns the seconds by phase so far, with "other" for time outside phases."""
        self._turn()
        return {name: round(spent, 4) for name, spent in self._seconds.items()}

    def _turn(self) -> None:
        now = time.perf_counter()
        name = self._stack[-1] if self._stack else "other"
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def install() -> None:
    """Measures all later runs of this process, with steps and telemetry as further phases."""
    trainer: Any = loop
    trainer.Phases = PhaseTimes
    course_type: Any = Course
    advance = Course.advance

    def stepping(course: Course, batch: Any) -> None:
        phases: Any = course.context.phases
        with phases.timed("steps"):
            advance(course, batch)
            if phases.first_step is None:
                jax.block_until_ready(course.state.params)
        phases.stepped()

    course_type.advance = stepping
    # Evaluation is a phase inside of `_show`.
    for owner, name in (
        (Bar, "update"),
        (Bar, "set_postfix_str"),
        (Course, "_show"),
        (Course, "progress"),
        (RunPlan, "bounds"),
    ):
        setattr(owner, name, _telemetry(getattr(owner, name)))


def _telemetry(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def measured(*args: Any, **options: Any) -> Any:
        if PhaseTimes.newest is None:
            return function(*args, **options)
        with PhaseTimes.newest.timed("telemetry"):
            return function(*args, **options)

    return measured
