"""Opens the folder and the logs of a run."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from dpoptax.training.run import files, resume
from dpoptax.training.run.announcer import Announcer
from dpoptax.training.run.checkpoints import Checkpoints

Record = dict[str, Any]

Log = list[Record] | str | Path | Callable[[Record], object] | None
"""Destination of records: a list, the path of a file of JSON lines, or a function."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Runtime context of a run. It does not affect the releases.

    Attributes:
        phases: Announces slow phases.
        checkpoints: The checkpoints, or None if nothing is saved.
        run_record: The record of the run in the folder, or None for a new run.
        observe: Called with each record.
        progress: Whether to show a progress bar.
        earlier: The records in metrics.jsonl that earlier starts have shown, by step.
    """

    phases: Announcer
    checkpoints: Checkpoints | None
    run_record: Record | None
    observe: Callable[[Record], object]
    progress: bool
    earlier: Mapping[int, Record]


@contextlib.contextmanager
def open_context(
    workdir: Path | None, phases: Announcer, *, log: Log, progress: bool
) -> Iterator[Context]:
    """Opens the folder and the logs of a run.

    Args:
        workdir: Folder for checkpoints and metrics.jsonl. None: neither is written.
        phases: As for `Context`.
        log: Another destination of records.
        progress: As for `Context`.

    Raises:
        TypeError: `log` has another type.
        CheckpointError: The folder cannot be used.
    """
    checkpoints, run_record, earlier = None, None, dict[int, Record]()
    sinks: list[Callable[[Record], object]] = []
    with contextlib.ExitStack() as stack:
        if workdir is not None:
            checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints"))
            with phases("waiting for a checkpoint"):
                run_record = resume.read_record(checkpoints, workdir)
            metrics = workdir / resume.METRICS
            earlier = resume.shown_records(metrics)
            sinks.append(_file_sink(metrics, earlier, stack))
        if isinstance(log, str | Path):
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            sinks.append(_file_sink(Path(log), {}, stack))
        elif isinstance(log, list):
            sinks.append(log.append)
        elif callable(log):
            sinks.append(log)
        elif log is not None:
            raise TypeError(f"`log` must be a list, a path or a function, got {log!r}.")

        def observe(record: Record) -> None:
            for sink in sinks if jax.process_index() == 0 else ():
                sink(dict(record))

        yield Context(phases, checkpoints, run_record, observe, progress, earlier)


def _file_sink(
    path: Path, known: Mapping[int, Record], stack: contextlib.ExitStack
) -> Callable[[Record], object]:
    """Returns a function that writes new records to a file, after the known ones by step.

    The file does not change before the first new record.
    """
    file: TextIO | None = None

    def write(record: Record) -> None:
        nonlocal file
        if record["step"] in known:
            return
        if file is None:  # a killed run may have left a part of a line
            text = "".join(files.to_json(each) + "\n" for each in known.values())
            files.write_text(path, text)
            file = stack.enter_context(path.open("a", encoding="utf-8", buffering=1))
        file.write(files.to_json(record) + "\n")

    return write
