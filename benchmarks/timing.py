"""Controls the worker processes of a measurement, which take turns."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from scipy.stats import binom

from benchmarks.variants import Cell, Variant, request

ROOT = Path(__file__).parents[1]


class WorkerError(Exception):
    """Raised when a worker fails, runs out of memory or dies."""


@dataclass
class Result:
    """One variant in one cell: milliseconds of every step by round, or the error.

    `ratio` and `memory_ratio` are relative to `baseline`, the fastest non-private step of the same
    framework in the same cell. `interval` holds order statistics of the rounds' ratios between
    which the median ratio lies with a confidence of 95 %, or the least and the largest of fewer
    than six. `facts` are those that the worker reports.
    """

    cell: Cell
    variant: Variant
    rounds: list[list[float]] = field(default_factory=list)
    compile_seconds: float | None = None
    peak_mb: float | None = None
    error: str | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    memory_ratio: float | None = None
    baseline: str | None = None
    facts: dict[str, float] = field(default_factory=dict)

    @property
    def steps(self) -> list[float]:
        return [ms for steps in self.rounds for ms in steps]

    @property
    def median(self) -> float:
        return statistics.median(self.steps)

    @property
    def quartiles(self) -> tuple[float, float]:
        steps = self.steps
        if len(steps) < 2:
            return steps[0], steps[0]
        low, _, high = statistics.quantiles(steps, n=4, method="inclusive")
        return low, high


class Worker:
    """A process that holds one variant's compiled step and runs it on request."""

    def __init__(self, python: str, cell: Cell, variant: Variant, memory_limit_gb: float):
        module = "benchmarks.torch_worker" if variant.uses_torch else "benchmarks.worker"
        message = json.dumps(request(cell, variant, memory_limit_gb))
        env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the worker
        self._process = subprocess.Popen(
            [python, "-m", module, message],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=env,
        )
        try:
            self.facts = self._reply()
        except WorkerError:
            self.close()
            raise

    def run(self, seconds: float) -> dict:
        """Runs steps for at least `seconds`; returns their times and the peak memory."""
        try:
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._reply()

    def close(self):
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _reply(self):
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._log.seek(0)
            log = self._log.read().strip().splitlines()
            raise WorkerError(f"died with status {code}: {log[-1][:200] if log else 'no message'}")
        message = json.loads(line)
        if "error" in message:
            raise WorkerError(message["error"])
        return message


@dataclass(frozen=True)
class Budget:
    """Limits on the measurement of a cell.

    Attributes:
      rounds: number of turns of every variant.
      seconds_per_turn: length of a turn, which has at least one step.
      seconds_per_cell: time after which no new round starts, once there are three rounds.
      memory_limit_gb: memory limit of a worker. A worker that needs more is listed as failed.
    """

    rounds: int = 10
    seconds_per_turn: float = 0.3
    seconds_per_cell: float = 900.0
    memory_limit_gb: float = 14.0


def measure(cell, variants, pythons, budget: Budget, progress) -> list[Result]:
    """Measures the variants of one cell in turns: A B C A B C …

    Args:
      cell: the training problem.
      variants: the variants to compare.
      pythons: the interpreters for JAX and torch. If torch has no interpreter, the reason is given.
      budget: rounds and limits.
      progress: a function that is called with a line of text at the start of every variant and
        every turn.
    """
    results, workers = [], []
    for variant in variants:
        progress(f"{cell}: compiling {variant}")
        result = Result(cell, variant)
        results.append(result)
        try:
            python, reason = pythons["torch" if variant.uses_torch else "jax"]
            if python is None:
                raise WorkerError(reason)
            worker = Worker(python, cell, variant, budget.memory_limit_gb)
        except WorkerError as error:
            result.error = str(error)
            continue
        result.compile_seconds = worker.facts.get("compile_seconds")
        result.facts = worker.facts
        workers.append((worker, result))
    start = time.monotonic()
    for turn in range(budget.rounds):
        if turn >= 3 and time.monotonic() - start > budget.seconds_per_cell:
            break
        for worker, result in workers:
            if result.error is not None:
                continue
            progress(f"{cell}: round {turn + 1}, {result.variant}")
            try:
                reply = worker.run(budget.seconds_per_turn)
            except WorkerError as error:
                result.error = str(error)
                continue
            result.rounds.append(reply["ms"])
            result.peak_mb = reply["peak_mb"]
    for worker, _ in workers:
        worker.close()
    _set_ratios(results)
    return results


def _set_ratios(results):
    for uses_torch in (False, True):
        group = [r for r in results if r.variant.uses_torch == uses_torch and r.error is None]
        baselines = [r for r in group if r.variant.is_baseline]
        if not baselines:
            continue
        best = min(baselines, key=lambda result: result.median)
        for result in group:
            # Compare round by round: a slow machine then slows both sides of a ratio.
            pairs = zip(result.rounds, best.rounds, strict=True)
            ratios = sorted(
                statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs
            )
            result.ratio = statistics.median(ratios)
            left_out = max(1, int(binom.ppf(0.025, len(ratios), 0.5))) - 1
            result.interval = ratios[left_out], ratios[-1 - left_out]
            result.memory_ratio = result.peak_mb / best.peak_mb
            result.baseline = str(best.variant)


def pythons(torch_python: str | None, reason: str = "") -> dict:
    """Returns the interpreters of both frameworks; `reason` explains a missing torch."""
    return {"jax": (sys.executable, ""), "torch": (torch_python, reason)}
