"""Opens the folder and the logs of a run."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from dpoptax.training.run import records, resume
from dpoptax.training.run.announcer import Announcer
from dpoptax.training.run.checkpoints import Checkpoints
from dpoptax.training.run.devices import Devices

Record = dict[str, Any]

Log = list[Record] | str | Path | Callable[[Record], object] | None
"""Destination of records: a list, the path of a file of JSON lines, or a function."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Runtime context of a run. It does not affect the releases.

    Attributes:
        place: The devices.
        phases: Announces slow phases.
        checkpoints: The checkpoints, or None if nothing is saved.
        begun: The record of the run in the folder, or None for a new run.
        observe: Called with each record.
        progress: Whether to show a progress bar.
        shown: The last step whose record an earlier start has shown.
        earlier: The records in metrics.jsonl that earlier starts have shown, by step.
    """

    place: Devices
    phases: Announcer
    checkpoints: Checkpoints | None = None
    begun: Record | None = None
    observe: Callable[[Record], object] = lambda record: None
    progress: bool = False
    shown: int = 0
    earlier: Mapping[int, Record] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def open_context(
    workdir: Path | None,
    place: Devices,
    phases: Announcer,
    *,
    log: Log = None,
    progress: bool = False,
    exact: bool = False,
    private: bool = True,
) -> Iterator[Context]:
    """Opens the folder and the logs of a run.

    Args:
        workdir: Folder for checkpoints and metrics.jsonl. None: neither is written.
        place: As for `Context`.
        phases: As for `Context`.
        log: Another destination of records.
        progress: As for `Context`.
        exact: Whether repeated steps must reproduce the metrics that were shown.
        private: Whether the run has a guarantee, so that shown steps count as releases.

    Raises:
        TypeError: `log` has another type.
        CheckpointError: The folder cannot be used.
    """
    checkpoints, begun, earlier, shown = None, None, dict[int, Record](), 0
    sinks: list[Callable[[Record], object]] = []
    with contextlib.ExitStack() as stack:
        if workdir is not None:
            checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints"))
            with phases("checkpoints"):
                begun = resume.begun(checkpoints, workdir)
            metrics = workdir / resume.METRICS
            earlier = resume.shown_records(metrics)
            shown = max(earlier, default=0) if private else 0
            sinks.append(stack.enter_context(metrics_file(metrics, shown)))
        if isinstance(log, str | Path):
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            sinks.append(stack.enter_context(metrics_file(Path(log))))
        elif isinstance(log, list):
            sinks.append(log.append)
        elif callable(log):
            sinks.append(log)
        elif log is not None:
            raise TypeError(f"`log` must be a list, a path or a function, got {log!r}.")

        def write(record: Record) -> None:
            for sink in sinks if jax.process_index() == 0 else ():
                sink(dict(record))

        observe: Callable[[Record], object] = write
        if exact and earlier:
            observe = resume.as_shown(write, earlier)
        yield Context(place, phases, checkpoints, begun, observe, progress, shown, earlier)


@contextlib.contextmanager
def metrics_file(path: Path, shown: int = 0) -> Iterator[Callable[[Record], object]]:
    """Yields a function that writes records to a file.

    The records up to step `shown` replace the file atomically. Until then, the old file documents
    the steps that an earlier start has shown.
    """
    with contextlib.ExitStack() as stack:
        file: TextIO | None = None
        held = ""

        def observe(record: Record) -> None:
            nonlocal file, held
            held += records.to_json(record) + "\n"
            if record["step"] < shown:
                return
            if file is None:
                partial = path.with_suffix(".partial")
                opened = open(partial, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
                file = stack.enter_context(opened)
                file.write(held)
                file.flush()
                partial.replace(path)
            else:
                file.write(held)
            held = ""

        yield observe
