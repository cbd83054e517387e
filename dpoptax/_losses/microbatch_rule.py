"""Chooses how many examples a device computes at once, where the user does not say it."""

import math

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun

from dpoptax._losses.trace_loss import TracedLoss
from dpoptax._support.jaxprs import open_jaxpr, subprograms, type_of

# Smaller micro-batches have kernels that are too small, or read and write the parameters too often.
# With larger ones, intermediate results leave the caches of a CPU. `python -m benchmarks` tries all
# sizes.
_LEAST_BYTES = 7e6
_TIMES_SHARED = 0.4

_CONTRACTIONS = ("conv_general_dilated", "dot_general")


def microbatch_rule(loss: TracedLoss, rows: int, platform: str) -> int:
    """Returns the number of examples that a device computes at once by default.

    On a CPU, this is the smallest power of two m with

        m · a  ≥  max(7 MB, 0.4 w)

    and at most `rows`. The matrix products and convolutions of the traced loss return a bytes for
    each example, and read w bytes that all examples share, once more in each step of a scan. Other
    platforms compute all examples at once. Only shapes and the platform count, so all hosts choose
    the same.

    Args:
      loss: the loss.
      rows: the number of examples on the device.
      platform: "cpu", "gpu" or "tpu".
    """
    if platform != "cpu":
        return max(1, rows)
    program = loss.program
    read_by_one, made_by_one = _contracted_bytes(program)
    # What examples share is in `made_by_one` as well, so a is at most as large.
    if rows * made_by_one <= _LEAST_BYTES:
        return max(1, rows)
    types = [jax.ShapeDtypeStruct((2, *v.aval.shape), v.aval.dtype) for v in program.jaxpr.invars]
    types[: loss.parameters] = program.in_avals[: loss.parameters]
    axes = [None if i < loss.parameters else 0 for i in range(len(types))]
    two = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), axes))(*types)
    # In a batch of two, what examples share counts once.
    read_by_two, made_by_two = _contracted_bytes(two)
    each, shared = made_by_two - made_by_one, 2 * read_by_one - read_by_two
    least = max(_LEAST_BYTES, _TIMES_SHARED * shared)
    size = 2 ** math.ceil(math.log2(max(1.0, least / max(1, each))))
    return max(1, min(rows, size))


def _contracted_bytes(program: Jaxpr | ClosedJaxpr) -> tuple[int, int]:
    """Returns the bytes that contractions read and return; those of a scan once per step."""
    read = made = 0
    for eqn in open_jaxpr(program).eqns:
        if eqn.primitive.name in _CONTRACTIONS:
            read += sum(map(_bytes, eqn.invars))
            made += sum(map(_bytes, eqn.outvars))
        steps = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for inner in map(_contracted_bytes, subprograms(eqn.params)):
            read += steps * inner[0]
            made += steps * inner[1]
    return read, made


def _bytes(atom: Var | Literal) -> int:
    kind = type_of(atom)
    return kind.size * kind.dtype.itemsize
