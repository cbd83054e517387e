"""Times the compilation of steps and counts their operations.

`python -m benchmarks compilation` builds each step in a separate process: without privacy on the
whole batch, with DP-SGD and DiSK in the default micro-batches, and with DP-SGD on the whole batch.
Processor time of all threads is counted, so other programs on the machine change it less than wall
time.
"""

import collections
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass

import jax
import tyro

from benchmarks.contenders import Setting, make_step
from benchmarks.timing import ROOT
from benchmarks.worker import problem_named
from dpoptax._support.jaxprs import equations
from dpoptax.training.run.files import markdown_table

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = \S+ ([\w\-]+)\(", re.MULTILINE)
_STEPS = {
    "non-private": ("non-private", "dp-sgd", True),
    "DP-SGD": ("dpoptax auto", "dp-sgd", False),
    "DP-SGD, whole batch": ("dpoptax auto", "dp-sgd", True),
    "DiSK": ("dpoptax auto", "disk", False),
}  # library, algorithm, and whether on the whole batch


@dataclass
class Compilation:
    """Times the compilation of steps and counts their operations."""

    models: tyro.conf.Positional[tuple[str, ...]] = ("mlp", "cnn", "transformer", "resnet_18")
    batch_size: int = 64
    rounds: int = 1
    """Turns of all steps of a model; the least time counts."""


@dataclass(frozen=True)
class Compiled:
    """Holds the cost of compiling one step.

    Attributes:
      trace: processor seconds to trace and lower the step.
      compile: processor seconds of XLA.
      equations: equations of the jaxpr and of the programs inside it.
      instructions: instructions of the compiled program.
      fusions: fusions among them.
    """

    trace: float
    compile: float
    equations: int
    instructions: int
    fusions: int


def main(options: Compilation) -> str:
    """Compiles all steps, and returns a table."""
    rows = []
    for model in options.models:
        turns = [
            {name: _in_process(model, name, options.batch_size) for name in _STEPS}
            for _ in range(options.rounds)
        ]
        best = {name: min((turn[name] for turn in turns), key=_seconds) for name in _STEPS}
        rows += [_row(model, name, each, best["non-private"]) for name, each in best.items()]
    header = "model", "step", "trace, s", "XLA, s", "ratio", "equations", "instructions", "fusions"
    return markdown_table(header, rows)


def _row(model: str, name: str, each: Compiled, plain: Compiled) -> list[str]:
    ratio = f"{_seconds(each) / _seconds(plain):.1f}"
    numbers = [f"{n:,}" for n in (each.equations, each.instructions, each.fusions)]
    return [model, name, f"{each.trace:.2f}", f"{each.compile:.2f}", ratio, *numbers]


def _seconds(each: Compiled) -> float:
    return each.trace + each.compile


def _in_process(model: str, name: str, batch_size: int) -> Compiled:
    command = [sys.executable, "-m", "benchmarks.compilation", model, name, str(batch_size)]
    done = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return Compiled(**json.loads(done.stdout.splitlines()[-1]))


def compile_step(model: str, name: str, batch_size: int) -> Compiled:
    """Compiles one step in this process."""
    problem = problem_named(model, {})
    batch = jax.block_until_ready(problem.make_batch(batch_size))
    library, algorithm, whole = _STEPS[name]
    setting = Setting(batch_size, batch_size if whole else None, algorithm, True, 2)
    step, opt_state = make_step(library, problem, setting)
    start = time.process_time()
    traced = step.trace(problem.params, opt_state, batch)
    lowered = traced.lower()
    between = time.process_time()
    compiled = lowered.compile()
    end = time.process_time()
    kinds = collections.Counter(_INSTRUCTION.findall(compiled.as_text()))
    traced_equations = sum(1 for _ in equations(traced.jaxpr))
    return Compiled(
        between - start, end - between, traced_equations, sum(kinds.values()), kinds["fusion"]
    )


if __name__ == "__main__":
    print(json.dumps(vars(compile_step(sys.argv[1], sys.argv[2], int(sys.argv[3])))))
