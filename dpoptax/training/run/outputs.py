"""Defines the result of a run and writes its files, except checkpoints and summary."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from dpoptax.training.run import records

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
        summary: Content of summary.json.
        history: Records of metrics.jsonl. The first one was made before any step.
        params: Final parameters, or their average if the config asks for one.
    """

    summary: Record
    history: list[Record]
    params: Any


@contextlib.contextmanager
def metrics_file(path: Path | None, shown: int = 0) -> Iterator[Callable[[Record], object]]:
    """A function that writes records; those up to step `shown` replace the file in one piece.

    Until then it is what says that an earlier start has shown so many steps.
    """
    with contextlib.ExitStack() as stack:
        file: TextIO | None = None
        held = ""

        def observe(record: Record) -> None:
            nonlocal file, held
            if path is None:
                return
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


def write(result: RunResult, workdir: Path) -> None:
    """Writes all files of a finished run except its metrics and the summary."""
    # With matplotlib, which the first step need not wait for.
    from dpoptax.training.run import figures

    records.save_params(workdir / "params.msgpack", result.params)
    figures.plot_run(result.summary, result.history, workdir / "training.png")
