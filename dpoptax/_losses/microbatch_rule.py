"""Chooses how many examples a device computes at once, where the user does not say it."""

import math

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from dpoptax._losses.trace_loss import TracedLoss
from dpoptax._support.jaxprs import open_jaxpr, subprograms, type_of

# Smaller micro-batches have kernels that are too small, or read and write the parameters too often.
# With twice as much, intermediate results leave the caches of a CPU. `python -m benchmarks` tries
# all sizes.
_LEAST_BYTES = 16e6
_TIMES_SHARED = 4


def microbatch_rule(loss: TracedLoss, rows: int, platform: str) -> int:
    """Returns the number of examples that a device computes at once by default.

    On a CPU, this is the smallest power of two m with

        m · a  ≥  max(16 MB, 4 w)

    and at most `rows`. The traced loss has a bytes of results for each example, and w bytes that
    all examples share: parameters, constants, and results of these only. Other platforms
    compute all examples at once. Only shapes and the platform count, so all hosts choose the same.

    Args:
      loss: the loss.
      rows: the number of examples on the device.
      platform: "cpu", "gpu" or "tpu".
    """
    if platform != "cpu":
        return max(1, rows)
    program = loss.program
    types = [jax.ShapeDtypeStruct((2, *v.aval.shape), v.aval.dtype) for v in program.jaxpr.invars]
    types[: loss.parameters] = program.in_avals[: loss.parameters]
    axes = [None if i < loss.parameters else 0 for i in range(len(types))]
    two = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), axes))(*types)
    # A batch of two adds the results of one example. Results that examples share stay as they are.
    each = _bytes_of_results(two) - _bytes_of_results(program)
    # The other results of one example are those that do not grow with the batch.
    arrays = [*program.jaxpr.invars[: loss.parameters], *program.jaxpr.constvars]
    shared = sum(map(_bytes, arrays)) + _bytes_of_results(program) - each
    least = max(_LEAST_BYTES, _TIMES_SHARED * shared)
    size = 2 ** math.ceil(math.log2(max(1.0, least / max(1, each))))
    return max(1, min(rows, size))


def _bytes_of_results(program: Jaxpr | ClosedJaxpr) -> int:
    """Returns the bytes of the results of all equations; those of a scan count once per step."""
    total = 0
    for eqn in open_jaxpr(program).eqns:
        inner = sum(map(_bytes_of_results, subprograms(eqn.params)))
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        # The results of a call are results of its program's equations, which are counted there.
        total += steps * inner or sum(map(_bytes, eqn.outvars))
    return total


def _bytes(atom: Var | Literal) -> int:
    kind = type_of(atom)
    return kind.size * kind.dtype.itemsize
