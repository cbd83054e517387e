"""Runs the steps of a program for one example, with the bodies of scans and `jax.checkpoint`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from dpoptax._losses.program import Block, Constant, DerivedValue, Step, Value
from dpoptax._support.jaxprs import bind
from dpoptax._support.tree import PyTree

Arrays: TypeAlias = list[jax.Array]
# Arrays by the index of their use or parameter.
ByIndex: TypeAlias = dict[int, Any]
# Runs a use; see `run_block`.
RunUse: TypeAlias = Callable[[Step, Arrays, Any], tuple[Arrays, Any]]


def run_block(
    block: Block, inputs: Sequence[jax.Array], by_use: ByIndex, run_use: RunUse
) -> tuple[Arrays, ByIndex]:
    """Runs the steps of a block for one example.

    Args:
      block: the steps.
      inputs: the values of `block.inputs`.
      by_use: arrays for each use, with a leading axis for each scan that is not yet entered.
      run_use: `run_use(step, operands, by_use[index])` returns the outputs of a use, and arrays to
        record.

    Returns:
      The results, and the records by use, with a leading axis for each scan of the block.
    """
    values = dict(zip(block.inputs, inputs, strict=True))
    records: ByIndex = {}

    def read(value: Value) -> jax.Array:
        if isinstance(value, DerivedValue) and isinstance(value.origin, Constant):
            return constant_array(value.origin.value, value.aval)
        return values[value]

    for step in block.steps:
        operands = [read(v) for v in step.operands]
        outputs: Sequence[jax.Array]
        if step.use is not None:
            index = step.use.index
            outputs, records[index] = run_use(step, operands, by_use[index])
        elif step.body is not None:
            body = functools.partial(run_block, step.body, run_use=run_use)
            outputs, inner = _run_body(step, operands, by_use, body)
            records |= inner
        else:
            outputs = bind(step.eqn, operands)
        values.update(zip(step.outputs, outputs, strict=True))
    return [read(v) for v in block.results], records


def _run_body(
    step: Step,
    operands: Arrays,
    by_use: ByIndex,
    run: Callable[[Arrays, ByIndex], tuple[Arrays, ByIndex]],
) -> tuple[Arrays, ByIndex]:
    """Returns the results of a step with a body, and the records of its uses.

    `run(inputs, by_use)` runs the body once.
    """
    params, body = step.eqn.params, step.body
    assert body is not None
    own = {use.index: by_use[use.index] for use in body.uses()}
    if step.scan_id is not None:
        return _scan(step, operands, own, run)
    run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return run(operands, own)


def _scan(
    step: Step,
    operands: Arrays,
    own: ByIndex,
    run: Callable[[Arrays, ByIndex], tuple[Arrays, ByIndex]],
) -> tuple[Arrays, ByIndex]:
    """Runs a scan, which slices the arrays of uses and stacks their records."""
    first, last = step.carry.start, step.carry.stop

    def one_step(carry: Arrays, inputs: PyTree) -> PyTree:
        slices, own = inputs
        outputs, records = run([*operands[:first], *carry, *slices], own)
        return outputs[: last - first], (outputs[last - first :], records)

    params = step.eqn.params
    carry, (stacked, records) = lax.scan(
        one_step,
        operands[first:last],
        (operands[last:], own),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked], records


def constant_array(value: Any, aval: ShapedArray) -> jax.Array:
    """Returns a constant of a trace as an array of its type."""
    extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return value if extended else jnp.asarray(value, aval.dtype)
