"""The files of a run, but for its checkpoints and the summary, which comes last."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import dpoptax
from dpoptax.training.run import recording, records

if TYPE_CHECKING:
    from dpoptax.training.loop import RunResult

Record = dict[str, Any]


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


def write(result: "RunResult", workdir: Path) -> None:
    """Everything that a finished run leaves next to its metrics, but for the summary."""
    # With matplotlib, which the first step need not wait for.
    from dpoptax.training.run import plots

    records.save_params(workdir / "params.msgpack", result.params)
    plots.plot_run(result.summary, result.history, workdir / "training.png")
    if result.recorded:
        recording.write(workdir / "recording.npz", result.recorded, result.noise_stddev)
        if len(result.recorded["released"]) > 1:
            recorded = dpoptax.filters.spectrum.load(workdir / "recording.npz")
            dpoptax.filters.spectrum.plot(recorded, workdir / "spectrum.png")
    if result.generated:
        records.write_lines(workdir / "generated.jsonl", result.generated)
