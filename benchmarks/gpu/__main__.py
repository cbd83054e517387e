"""Tests and measures dpoptax on one GPU, within a time limit and without a network.

    python -m benchmarks.gpu --minutes 9 --out DIR

Writes DIR/results.json after each case, and DIR/log.txt. Cases for which too little time is left
are skipped, and a case that fails is recorded with its error.
"""

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

SECTIONS = ("correctness", "steps")
# The share of the time for correctness, at most.
CORRECTNESS = 0.3


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs the sections of a command line and returns their results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--only", nargs="+", help="names of cases, in this order")
    parser.add_argument("--threads", type=int, default=6, help="programs compiled at once")
    parser.add_argument("--ahead", action="store_true", help="compile all steps first")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a test on CPU")
    given = parser.parse_args(arguments)
    # For peaks of memory, and for torch in a separate process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    return _run(given)


def _run(given: argparse.Namespace) -> dict[str, Any]:
    # After the variables are set, because JAX reads them when it starts.
    import jax

    from benchmarks.gpu import correctness, networks, steps, torch_steps
    from benchmarks.gpu.schedule import Schedule
    from dpoptax._support import xla as _xla

    schedule = Schedule(given.out, given.minutes)
    timer = schedule.stop_after(5.0)
    device = jax.devices()[0]
    about = {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "minutes": given.minutes,
        "small": given.small,
        "default precision": "bfloat16" if _xla.rounds_products(device) else "float32",
    }
    for name, value in about.items():
        schedule.record("about", name, value)
    schedule.say(", ".join(f"{name} {value}" for name, value in about.items()))

    def chosen(tasks: Any) -> Any:
        by_name = {task.name: task for task in tasks}
        return [by_name[name] for name in given.only or by_name if name in by_name]

    try:
        if "correctness" in given.sections:
            share = CORRECTNESS if "steps" in given.sections else 1.0
            schedule.run(
                "correctness",
                chosen(correctness.tasks(given.small)),
                describe=correctness.describe,
                threads=given.threads,
                budget=share * 60.0 * given.minutes,
            )
        if "steps" in given.sections:
            cases = networks.SMALL if given.small else networks.NETWORKS
            cases = {name: cases[name] for name in given.only or cases if name in cases}
            step_tasks = steps.tasks(cases, schedule, given.threads, ahead=given.ahead)
            schedule.run("steps", step_tasks, describe=steps.describe)
            torch_tasks = torch_steps.tasks(given.small, schedule.left)
            schedule.run("torch", chosen(torch_tasks), describe=steps.describe)
        schedule.say(f"done, {schedule.left():.0f} s left")
    finally:
        timer.cancel()
    return schedule.results


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads that still compile
