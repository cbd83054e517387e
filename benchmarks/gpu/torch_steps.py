"""Measures Opacus next to the plain step of torch: `python -m benchmarks.gpu.torch_steps REQUEST`.

This runs in a separate process, since torch and JAX would share the memory of the device.
"""

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.schedule import Task

ROOT = Path(__file__).parents[2]
PLAIN, TURNS, TURN_SECONDS = "torch non-private", 6, 0.15
GPT2 = {"length": 128, "width": 768, "layers": 12, "vocabulary": 50_257}
CASES: dict[str, dict[str, Any]] = {
    "CNN": {"model": "cnn", "options": {}, "batch_size": 256},
    "GPT-2, T=128": {"model": "transformer", "options": GPT2, "batch_size": 64},
}
SMALL = {"MLP": {"model": "mlp", "options": {}, "batch_size": 8}}


def tasks(small: bool, left: Callable[[], float]) -> list[Task]:
    """Returns a task for each case; `left()` is the time limit of its process."""
    cases = SMALL if small else CASES
    return [
        Task(f"torch, {name}", 30.0, partial(measure, case, left)) for name, case in cases.items()
    ]


def measure(case: dict[str, Any], left: Callable[[], float]) -> dict[str, Any]:
    """Returns the numbers of torch and Opacus, and the ratios.

    Raises:
      RuntimeError: torch is missing or its process fails.
    """
    if importlib.util.find_spec("torch") is None:
        raise RuntimeError("torch is not installed.")
    found = {}
    for library in (PLAIN, "Opacus ghost"):
        request = json.dumps(case | {"library": library})
        result = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.torch_steps", request],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            timeout=max(1.0, left()),
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            found[library] = {"error": lines[-1][:300]}
        else:
            found[library] = json.loads(result.stdout.splitlines()[-1])
    plain = found[PLAIN]
    for numbers in found.values():
        for ratio, key in (("time ratio", "ms"), ("memory ratio", "memory GiB")):
            if numbers.get(key) and plain.get(key):
                numbers[ratio] = numbers[key] / plain[key]
    return found


def _numbers(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the time and peak memory of a step."""
    import torch

    from benchmarks.torch_worker import build

    torch.set_float32_matmul_precision("high")  # TF32, JAX's default on a GPU
    torch.backends.cudnn.allow_tf32 = True
    step, _ = build(request)
    gpu = torch.cuda.is_available()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            step()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    start = time.perf_counter()
    seconds(3)
    first = time.perf_counter() - start
    count = max(1, min(200, round(TURN_SECONDS / seconds(1))))
    times = [1e3 * seconds(count) / count for _ in range(TURNS)]
    memory = torch.cuda.max_memory_allocated() / 2**30 if gpu else 0.0
    return {
        "ms": statistics.median(times),
        "turns ms": times,
        "memory GiB": memory,
        "compile s": first,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    print(json.dumps(_numbers(json.loads(sys.argv[1]))))
