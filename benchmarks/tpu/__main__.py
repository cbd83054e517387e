"""Compiles and compares plain and private training steps for an absent TPU.

    uv run --group tpu python -m benchmarks.tpu [CASE...] [--topology v5e:4x4] [--json FILE]

Prints a Markdown table for one chip and one step: temporary memory, operations of the matrix unit
times the passes they take, bytes of main memory read and written, processor time of tracing and
compilation, and collectives. All numbers are the compiler's: nothing is executed. Collectives
marked "*" are in loops. `--list` lists the cases. Compilation takes minutes per case.
"""

import argparse
import contextlib
import dataclasses
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.tpu import cases, hlo
from benchmarks.tpu.cases import CASES, Case, Options

HEADER = (
    "| case | step | temporary memory, GB | passes, Gflop | HBM, GB | kernels | compile, s "
    "| collectives, MB |\n|:--|:--|--:|--:|--:|--:|--:|:--|"
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """The numbers of one compiled step on one chip.

    Attributes:
      temporary_gb: temporary memory.
      gflop: operations of contractions times passes of the matrix unit.
      hbm_gb: bytes of main memory read and written.
      kernels: kernels that run.
      compile_s: processor time of tracing and compilation.
      collectives: number and bytes of each kind.
      error: why compilation failed, such as too little memory; empty otherwise.
    """

    temporary_gb: float = 0.0
    gflop: float = 0.0
    hbm_gb: float = 0.0
    kernels: int = 0
    compile_s: float = 0.0
    collectives: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    error: str = ""


def measure(case: Case, options: Options, step: str, mesh: Mesh) -> Measured:
    """Compiles the "plain" or "private" step of a case and returns its numbers."""
    model = case.model()
    if step == "plain":
        function, state = cases.plain_step(case, model)
    else:
        function, state = cases.private_step(case, model, options, mesh)
    args = cases.place(case, model, state, mesh)
    with cases.context(case, mesh):
        return compile_step(function, args, mesh)


def compile_step(function: Callable[..., Any], args: tuple[Any, ...], mesh: Mesh) -> Measured:
    """Compiles a step that donates its first two arguments, and returns its numbers."""
    start = time.process_time()
    platform = mesh.devices.flat[0].platform.replace("gpu", "cuda")
    try:
        traced = jax.jit(function, donate_argnums=(0, 1)).trace(*args)
        compiled = traced.lower(lowering_platforms=(platform,)).compile()
    except jax.errors.JaxRuntimeError as error:
        return Measured(compile_s=time.process_time() - start, error=_reason(str(error)))
    seconds, cost = time.process_time() - start, hlo.cost(compiled.as_text())
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # Elsewhere, products are calls of libraries, and have other units.
    gflop = cost.passes / 1e9 if platform == "tpu" else 0.0
    moved = cost.hbm_bytes / 1e9
    return Measured(temporary / 1e9, gflop, moved, cost.kernels, seconds, cost.collectives)


def _reason(text: str) -> str:
    """Returns the first line of an error, or the memory of a program that does not fit."""
    used = re.search(r"Used ([\d.]+[MGT]) of ([\d.]+[MGT]) hbm", text)
    return f"needs {used[1]} of {used[2]}" if used else text.splitlines()[0][:120]


def row(name: str, step: str, x: Measured) -> str:
    """Returns the row of one step."""
    kinds = [f"{kind} {number}: {size / 1e6:.0f}" for kind, (number, size) in x.collectives.items()]
    gflop = f"{x.gflop:,.0f}" if x.gflop else "–"
    numbers = f"{x.temporary_gb:.2f} | {gflop} | {x.hbm_gb:.1f} | {x.kernels:,}"
    if x.error:
        kinds, numbers = [x.error], "– | – | – | –"
    return f"| {name} | {step} | {numbers} | {x.compile_s:.0f} | {', '.join(kinds)} |"


def ratio_row(plain: Measured, private: Measured) -> str:
    """Returns the row of the numbers of the private step over those of the plain step."""
    names = ("temporary_gb", "gflop", "hbm_gb", "kernels", "compile_s")
    pairs = [(getattr(private, name), getattr(plain, name)) for name in names]
    ratios = [f"**{a / b:.2f}**" if a and b else "–" for a, b in pairs]
    return f"| | ratio | {' | '.join(ratios)} | |"


@contextlib.contextmanager
def announced(text: str, every: float = 20.0) -> Iterator[None]:
    """Prints a line to stderr, then the time every few seconds."""
    start, ended = time.monotonic(), threading.Event()

    def tick() -> None:
        while not ended.wait(every):
            print(f"  {text}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    print(text, file=sys.stderr, flush=True)
    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def main(arguments: list[str] | None = None, show: Callable[..., Any] = print) -> None:
    """Compiles the cases of a command line and prints their table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument(
        "--topology", help="devices, such as v5e:4x4, h100 or cpu; default: those of the case"
    )
    parser.add_argument("--batch-size", type=int, help="default: that of the case")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--only", choices=["plain", "private"])
    parser.add_argument("--clip", choices=["flat", "per-layer"], default="flat")
    parser.add_argument("--method", choices=["auto", "vmap", "recompute"], default="auto")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], help="default: for TPU")
    parser.add_argument("--microbatch-size", type=int)
    parser.add_argument("--no-noise", dest="noise", action="store_false", help="clip and sum only")
    parser.add_argument(
        "--no-mesh", dest="mesh", action="store_false", help="leave `mesh=` out; only jit shards"
    )
    given = parser.parse_args(arguments)
    if given.list:
        for name, case in CASES.items():
            show(f"{name:20} {case.batch_size} examples on {case.topology}")
        return
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}. `--list` lists the cases.")
    options = Options(**{f.name: getattr(given, f.name) for f in dataclasses.fields(Options)})
    results: dict[str, Any] = {}
    show(HEADER)
    for name in given.cases or CASES:
        case = CASES[name]
        if given.batch_size:
            case = dataclasses.replace(case, batch_size=given.batch_size)
        mesh, found = cases.make_mesh(given.topology or case.topology), {}
        for step in ("plain", "private") if given.only is None else (given.only,):
            with announced(f"{name}: compiling the {step} step for {mesh.size} chips"):
                found[step] = measure(case, options, step, mesh)
            show(row(name, step, found[step]), flush=True)
        if len(found) == 2:
            show(ratio_row(**found), flush=True)
        results[name] = {step: dataclasses.asdict(x) for step, x in found.items()}
        if given.json:
            everything = {"options": dataclasses.asdict(options), "cases": results}
            given.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
