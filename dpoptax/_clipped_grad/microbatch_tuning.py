"""Chooses the micro-batch size by timing the user's step."""

import time
from collections.abc import Callable, Sequence

import jax

from dpoptax._support.tree import PyTree

# A training step with any arguments and results.
Step = Callable[..., PyTree]

# Times that differ by less than this factor count as equal.
_ALIKE = 1.05
# A turn of fast steps makes as many calls as fit in this time, up to this many.
_TURN_SECONDS = 0.05
_TURN_CALLS = 20
# Turns that every candidate takes, since another program may slow down one turn.
_TURNS_OF_ALL = 2


def tune_microbatch_size(
    make_step: Callable[[int], Step],
    *args: PyTree,
    batch_size: int,
    candidates: Sequence[int] | None = None,
    rounds: int = 3,
) -> int:
    """Returns the smallest micro-batch size that is nearly as fast as possible.

    The function compiles and runs the step of every candidate. Candidates then take turns, `rounds`
    times, so that changes of the machine's speed affect all of them. A turn is one call, or several
    fast calls. A candidate drops out if it takes 1.5 times as long as the best after two turns. As
    in training, a result replaces the argument with the same structure and shapes. The smallest
    time of each candidate counts. Of the candidates within 5 % of the fastest, the smallest wins,
    because it needs the least memory. Candidates that do not fit in memory are skipped. Without
    `candidates`, twice and half the winner then compete with it in the same way.

    Privacy: no cost. The choice depends only on times, the size changes the result only by
    rounding, and the outputs of the timed steps are discarded.

    Args:
      make_step: `make_step(microbatch_size)` returns the step, a function of `args`, preferably
        under `jax.jit`. It may donate its arguments, which are copies.
      *args: the arguments of the step, such as parameters, optimizer state, batch and mask.
      batch_size: the number of examples in the batch.
      candidates: the sizes to try. Defaults to `batch_size` divided by 1, 4, 16, … and rounded up,
        down to about 4, and then twice and half the best of these.
      rounds: the number of turns of each candidate.

    Raises:
      ValueError: `candidates` is empty, one is not between 1 and `batch_size`, or `rounds` is below
        1.
      MemoryError: every candidate exceeds the memory.

    >>> import dpoptax, jax, jax.numpy as jnp
    >>> clip = dpoptax.l2_clip(1.0)
    >>> def make_step(microbatch_size):
    ...     grad_fn = dpoptax.clipped_grad(
    ...         lambda w, x: jnp.sum((w - x) ** 2), clip, microbatch_size=microbatch_size
    ...     )
    ...     return jax.jit(lambda w, batch: grad_fn(w, batch))
    >>> w, batch = jnp.zeros(3), jnp.ones((8, 3))
    >>> tune_microbatch_size(make_step, w, batch, batch_size=8, candidates=[2, 8]) in (2, 8)
    True
    """
    sizes = _default_candidates(batch_size) if candidates is None else list(candidates)
    if not sizes or not all(1 <= size <= batch_size for size in sizes):
        raise ValueError(
            f"`candidates` must be sizes between 1 and batch_size={batch_size}, got {sizes}."
        )
    if rounds < 1:
        raise ValueError(f"`rounds` must be at least 1, got {rounds}.")
    steps = dict[int, Step]()
    carried = [_copy(arg) for arg in args]

    def fastest(sizes: Sequence[int]) -> int:
        best = dict[int, float]()
        for size in sizes:
            try:
                steps[size] = steps.get(size) or make_step(size)
                _seconds(steps[size], args, carried)
                best[size] = float("inf")
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
        if not best:
            raise MemoryError(f"No micro-batch size of {sizes} fits in memory. Try smaller ones.")
        for turn in range(rounds):
            for size in best:
                if turn < _TURNS_OF_ALL or best[size] <= 1.5 * min(best.values()):
                    best[size] = min(best[size], _seconds(steps[size], args, carried))
        return min(size for size in best if best[size] <= _ALIKE * min(best.values()))

    size = fastest(sizes)
    if candidates is not None:
        return size
    return fastest(sorted({size, min(2 * size, batch_size), -(-size // 2)}))


def _default_candidates(batch_size: int) -> list[int]:
    sizes = [batch_size]
    while sizes[-1] >= 16:
        sizes.append(-(-sizes[-1] // 4))
    return sizes


def _seconds(step: Step, args: tuple[PyTree, ...], carried: list[PyTree]) -> float:
    """Returns the time of a turn's fastest call, and updates `carried`, its arguments."""
    calls: list[float] = []
    while not calls or (sum(calls) < _TURN_SECONDS and len(calls) < _TURN_CALLS):
        for i, arg in enumerate(carried):
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(arg)):
                carried[i] = _copy(args[i])  # donated, and no result replaced it
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
