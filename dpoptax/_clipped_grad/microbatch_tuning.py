"""Choosing the microbatch size by timing the user's own step."""

import time
from collections.abc import Callable, Sequence

import jax

from dpoptax._tree import PyTree

# What is timed: a training step, whatever it takes and returns.
Step = Callable[..., PyTree]

# Times that differ by less than this factor are taken for equal.
_ALIKE = 1.05
# A turn of fast steps has as many calls as fit into this time, but not more than so many.
_TURN_SECONDS = 0.05
_TURN_CALLS = 20
# One slow turn may be another program's doing.
_TURNS_OF_ALL = 2


def tune_microbatch_size(
    make_step: Callable[[int], Step],
    *args: PyTree,
    batch_size: int,
    candidates: Sequence[int] | None = None,
    rounds: int = 3,
) -> int:
    """Returns the smallest microbatch size with which a step is about as fast as it can be here.

    Every candidate's step is compiled and run, then the candidates take `rounds` turns, so that a
    change of the machine's pace meets all alike; one that is 1.5 times slower than the best after
    two turns drops out. A turn is one call, or several in a row if they are fast, each with what
    the one before returned, as in training: a result that looks like an argument takes its place.
    The smallest time of each counts, and of those within 5 % of the fastest the smallest size wins,
    as it needs the least memory. A candidate that does not fit into memory is left out.

    The size changes memory and speed, not the result but for rounding, so that the choice, which
    looks at times alone, costs no privacy. The outputs of the timed steps are thrown away.

    Args:
      make_step: `make_step(microbatch_size)` returns the step, a function of `args`, best under
        `jax.jit`. It may donate its arguments: it gets copies of them.
      *args: what the step is called with, such as parameters, optimizer state, batch and mask.
      batch_size: number of examples in the batch.
      candidates: sizes to try; by default `batch_size` divided by 1, 4, 16, … down to 4.
      rounds: turns of each candidate.

    Raises:
      ValueError: no candidates, one that is not between 1 and `batch_size`, or `rounds` below 1.
      MemoryError: no candidate fits into memory.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> clip = dpoptax.l2_clip(1.0)
    >>> def make_step(microbatch_size):
    ...     grad_fn = dpoptax.clipped_grad(
    ...         lambda w, x: jnp.sum((w - x) ** 2), clip, microbatch_size=microbatch_size
    ...     )
    ...     return jax.jit(lambda w, batch: grad_fn(dpoptax.gradient_points((), w), batch))
    >>> w, batch = jnp.zeros(3), jnp.ones((8, 3))
    >>> tune_microbatch_size(make_step, w, batch, batch_size=8, candidates=[2, 8]) in (2, 8)
    True
    """
    sizes = _default_candidates(batch_size) if candidates is None else list(candidates)
    if not sizes or not all(1 <= size <= batch_size for size in sizes):
        raise ValueError(f"candidates={sizes}: want sizes between 1 and batch_size={batch_size}")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: want at least 1")
    steps = {}
    carried = [_copy(arg) for arg in args]
    for size in sizes:
        step = make_step(size)
        try:
            _seconds(step, args, carried)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        else:
            steps[size] = step
    if not steps:
        raise MemoryError(f"no microbatch size of {sizes} fits into memory: try smaller ones")
    best = dict.fromkeys(steps, float("inf"))
    for turn in range(rounds):
        for size in steps:
            if turn < _TURNS_OF_ALL or best[size] <= 1.5 * min(best.values()):
                best[size] = min(best[size], _seconds(steps[size], args, carried))
    return min(size for size in best if best[size] <= _ALIKE * min(best.values()))


def _default_candidates(batch_size: int) -> list[int]:
    sizes = [batch_size]
    while sizes[-1] % 4 == 0 and sizes[-1] >= 16:
        sizes.append(sizes[-1] // 4)
    return sizes


def _seconds(step: Step, args: tuple[PyTree, ...], carried: list[PyTree]) -> float:
    """The time of a turn's fastest call. `carried` is what to call with, and is kept up to date."""
    calls: list[float] = []
    while not calls or (sum(calls) < _TURN_SECONDS and len(calls) < _TURN_CALLS):
        for i, arg in enumerate(carried):
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arg)):
                carried[i] = _copy(args[i])  # donated, and nothing came back for it
        jax.block_until_ready(carried)
        start = time.perf_counter()
        results = jax.block_until_ready(step(*carried))
        calls.append(time.perf_counter() - start)
        results = list(results) if isinstance(results, tuple) else [results]
        for i, arg in enumerate(args):
            same = [k for k, result in enumerate(results) if _kind(result) == _kind(arg)]
            if same:
                carried[i] = results.pop(same[0])
    return min(calls)


def _kind(tree: PyTree) -> tuple[object, list[tuple[object, object]]]:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves]


def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)
