"""Measures compile seconds, time and memory of steps on the default device."""

import functools
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import Setting, make_step, params_and_state
from benchmarks.gpu.networks import Contender, Network
from benchmarks.gpu.schedule import Schedule, Task
from benchmarks.models import Problem

# Turns of all contenders of a network, and the seconds of a turn. The first turn warms up.
TURNS, TURN_SECONDS = 6, 0.15
# After these seconds, contenders of a network that are not yet compiled are left out.
COMPILE_SECONDS = 120
GIB = 2**30
_making = threading.Lock()
# Operations of compiled programs that start kernels, or wait for the host.
_OPERATIONS = re.compile(r" (fusion|custom-call|while|conditional|call|copy|sort)\(")


def tasks(
    networks: dict[str, Network], schedule: Schedule, threads: int, *, ahead: bool = False
) -> list[Task]:
    """Returns a task for each network.

    With `ahead`, the contenders of all networks are compiled before the first is measured. This
    uses all processor cores, but needs memory for all of them.
    """
    everything: list[Future[Running]] = []
    pool = ThreadPoolExecutor(threads)

    def make(name: str, network: Network) -> Task:
        def measured() -> dict[str, Any]:
            compiling = started if started is not None else start(network, pool)
            wait(everything, COMPILE_SECONDS)
            everything.clear()  # since their results hold memory
            return measure(network, compiling, schedule)

        started = start(network, pool) if ahead else None
        everything.extend(started.values() if started else [])
        seconds = network.seconds * len(network.contenders)
        return Task(name, seconds / 4 if ahead else seconds, measured)

    return [make(name, network) for name, network in networks.items()]


def start(network: Network, pool: ThreadPoolExecutor) -> "dict[str, Future[Running]]":
    """Starts to compile every contender of a network."""
    make = functools.cache(lambda: _problem_and_batch(network))
    return {
        str(contender): pool.submit(_compiled, contender, make, network.batch_size)
        for contender in network.contenders
    }


def _problem_and_batch(network: Network) -> tuple[Problem, Any]:
    problem = network.problem()
    return problem, jax.block_until_ready(problem.make_batch(network.batch_size))


def _compiled(
    contender: Contender, make: Callable[[], tuple[Problem, Any]], batch_size: int
) -> "Running":
    with _making:  # one at a time
        problem, batch = make()
    return Running(contender, problem, batch, batch_size)


def measure(
    network: Network, compiling: "dict[str, Future[Running]]", schedule: Schedule
) -> dict[str, Any]:
    """Returns the numbers of every contender, and their ratios to the non-private step."""
    found: dict[str, Any] = {}
    running: dict[str, Running] = {}
    ends = time.monotonic() + COMPILE_SECONDS
    for name, future in compiling.items():
        try:
            running[name] = future.result(max(0.0, ends - time.monotonic()))
            schedule.say(f"  compiled {name} in {running[name].facts['compile s']:.1f} s")
        except TimeoutError:  # the thread goes on, since nothing stops a compiler
            error = TimeoutError(f"compilation took more than {COMPILE_SECONDS} s")
            found[name] = {"error": schedule.failed(name, error)}
        except Exception as error:  # of any library
            found[name] = {"error": schedule.failed(name, error)}
    compiling.clear()  # so that their memory is free afterwards
    for _ in range(TURNS):
        for name, each in list(running.items()):
            try:
                each.turn()
            except Exception as error:  # such as too little memory
                found[name] = each.facts | {"error": schedule.failed(name, error)}
                del running[name]
    found |= {name: each.numbers() for name, each in running.items()}
    plain = found[str(network.contenders[0])]
    for numbers in found.values():
        for ratio, key in (("time ratio", "ms"), ("memory ratio", "memory GiB")):
            if key in numbers and plain.get(key):
                numbers[ratio] = numbers[key] / plain[key]
    return {str(contender): found[str(contender)] for contender in network.contenders}


def describe(result: dict[str, Any]) -> str:
    """Returns a table of the contenders."""
    lines = []
    for name, x in result.items():
        if "error" in x:
            lines.append(f"\n    {name:44} {x['error']}")
            continue
        ratios = f"{x.get('time ratio', 0):5.2f} x time, {x.get('memory ratio', 0):5.2f} x memory"
        lines.append(
            f"\n    {name:44} {x['ms']:9.3f} ms, {x['memory GiB']:7.3f} GiB, {ratios}, "
            f"compiled in {x['compile s']:.1f} s"
        )
    return "".join(lines)


class Running:
    """A compiled step with its parameters and state, and the times of its turns."""

    def __init__(self, contender: Contender, problem: Problem, batch: Any, batch_size: int):
        self._algorithm = contender.algorithm
        self._data = (batch,) if problem.frozen is None else (batch, problem.frozen)
        own = problem._replace(params=_copy(problem.params))
        setting = Setting(
            batch_size, contender.microbatch_size, contender.algorithm, noise=True, points=2
        )
        step, state = make_step(contender.library, own, setting)
        self._state, self._ms = (own.params, state), []
        start = time.perf_counter()
        lowered = step.lower(*self._state, *self._data)
        traced = time.perf_counter()
        self._step = lowered.compile(contender.compiler_options)
        memory = self._step.memory_analysis()
        arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
        temporary, alias = memory.temp_size_in_bytes, memory.alias_size_in_bytes
        self.facts: dict[str, Any] = {
            "trace s": traced - start,
            "compile s": time.perf_counter() - start,
            "temporary GiB": temporary / GIB,
            "memory GiB": (temporary + arguments + outputs - alias) / GIB,
            "operations": Counter(_OPERATIONS.findall(self._step.as_text())),
        }

    def turn(self) -> None:
        """Runs steps for a turn and stores the mean time of one; the first turn is a warm-up."""
        if not self._ms:
            before = _peak()
            self._run(2)
            after = _peak()
            if before and after and after > before:  # otherwise the peak is that of another step
                self.facts["device peak GiB"] = after / GIB
            start = time.perf_counter()
            self._run(1)
            self._count = max(1, min(200, round(TURN_SECONDS / (time.perf_counter() - start))))
        start = time.perf_counter()
        self._run(self._count)
        self._ms.append(1e3 * (time.perf_counter() - start) / self._count)

    def numbers(self) -> dict[str, Any]:
        """Returns the median time, the times of all turns, memory and compile seconds."""
        times = self._ms[1:] or self._ms
        finite = all(
            np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(self._state[0]))
        )
        return {
            "ms": statistics.median(times),
            "turns ms": times,
            "finite": bool(finite),
            **self.facts,
        }

    def _run(self, count: int) -> None:
        for _ in range(count):
            results = self._step(*self._state, *self._data)
            self._state = params_and_state(results, self._algorithm)
        jax.block_until_ready(self._state)


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _peak() -> int | None:
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None
