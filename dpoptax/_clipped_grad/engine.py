"""The interface of engines, which sum the clipped gradients of one micro-batch."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from dpoptax._support.tree import PyTree

# `sum(loss, points, examples)` returns the total and the auxiliary outputs at the first point. The
# sums of micro-batches can be added. Engines that sum in the backward pass also take `devices`.
EngineSum: TypeAlias = Callable[..., tuple[PyTree, PyTree]]


class Engine(NamedTuple):
    """Computes clipped sums.

    Attributes:
      sum: sums one micro-batch; see `EngineSum`.
      join: `join(params, total)` returns a total shaped like the parameters, or as the clip encodes
        it. It runs after the loop over micro-batches, which then carries fewer arrays.
      in_backward: whether the engine sums during the backward pass. On a mesh, it then adds sums
        over devices itself, and the compiler shards the loss.
    """

    sum: EngineSum
    join: Callable[[PyTree, PyTree], PyTree]
    in_backward: bool = False
