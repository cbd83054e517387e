"""Compares ways to store arrays on a GPU: `python -m benchmarks.gpu.storage`.

dpoptax stores arrays in a loop of zero turns. A GPU asks the host before each turn, which a small
step waits for. This prints the times of steps that store in other ways, and the operations of the
compiled programs. "barrier" does not store, and shows the cost of the others.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import models
from benchmarks.gpu.networks import AUTO, DISK
from benchmarks.gpu.steps import TURNS, Running
from dpoptax._support import xla as _xla

BATCH_SIZE = 256
_way = threading.local()


def in_call(arrays: list[jax.Array]) -> list[jax.Array]:
    """Passes arrays through a function that XLA does not inline."""
    # Here, since not every version of JAX has it.
    from jax.experimental.scheduling_groups import xla_metadata_call

    stored: list[jax.Array] = xla_metadata_call(lambda x: x, inlineable="false")(arrays)
    return stored


def in_two_turns(arrays: list[jax.Array]) -> list[jax.Array]:
    """Negates the first entry of each array twice; XLA knows the number of turns."""

    def turn(_: Any, arrays: list[jax.Array]) -> list[jax.Array]:
        return [
            lax.dynamic_update_slice(x, -lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), (0,) * x.ndim)
            for x in arrays
        ]

    stored: list[jax.Array] = lax.fori_loop(0, 2, turn, arrays)
    return stored


def in_empty_loop(arrays: list[jax.Array]) -> list[jax.Array]:
    """Passes arrays through a loop of zero turns, whose number XLA does not know."""
    never = lax.optimization_barrier(jnp.zeros([], jnp.int32))
    _, stored = lax.while_loop(
        lambda carry: carry[0] < never,
        lambda carry: (carry[0] + 1, list(map(lax.neg, carry[1]))),
        (jnp.zeros_like(never), arrays),
    )
    return stored


WAYS: dict[str, Callable[[list[jax.Array]], list[jax.Array]]] = {
    "empty loop": in_empty_loop,
    "barrier": lax.optimization_barrier,
    "call": in_call,
    "two turns": in_two_turns,
}
_THROUGH_BRANCH = _xla._through_branch


def _store(arrays: list[jax.Array], change: Any = lax.optimization_barrier) -> list[jax.Array]:
    if change is lax.optimization_barrier:
        return _THROUGH_BRANCH(arrays)
    return WAYS[_way.name](arrays)


def main() -> None:
    """Prints a line for each way and step."""
    _xla._through_branch = _store
    problem = models.mlp()
    batch = jax.block_until_ready(problem.make_batch(BATCH_SIZE))

    def compiled(name: str, contender: Any) -> Any:
        _way.name = name
        try:
            return Running(contender, problem, batch, BATCH_SIZE)
        except Exception as error:  # of the compiler
            return f"{type(error).__name__}: {str(error)[:300]}"

    cases = [(name, contender) for contender in (AUTO, DISK) for name in WAYS]
    with ThreadPoolExecutor(len(cases)) as pool:
        steps = list(pool.map(compiled, *zip(*cases, strict=True)))
    for _ in range(TURNS):
        for step in steps:
            if not isinstance(step, str):
                step.turn()
    for (name, contender), step in zip(cases, steps, strict=True):
        if isinstance(step, str):
            print(contender, name, step)
        else:
            numbers = step.numbers()
            print(contender, name, f"{numbers['ms']:.4f} ms", json.dumps(numbers["operations"]))


if __name__ == "__main__":
    main()
