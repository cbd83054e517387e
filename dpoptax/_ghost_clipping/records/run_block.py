"""Runs the steps of a program for one example, or those that depend on parameters only."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from dpoptax._losses.traced_program import (
    Block,
    Constant,
    DerivedValue,
    Parameter,
    ProgramStep,
    Result,
    ScanSlices,
    Value,
)
from dpoptax._support.jaxprs import bind
from dpoptax._support.tree import PyTree

Arrays: TypeAlias = list[jax.Array]
# Arrays by the index of their use or parameter.
ByIndex: TypeAlias = dict[int, Any]
# Runs a use; see `run_block`.
RunUse: TypeAlias = Callable[[ProgramStep, Arrays, Any], tuple[Arrays, Any]]


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
            # Literals in the program are constants that no step returns.
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
    step: ProgramStep,
    operands: Arrays,
    by_use: ByIndex,
    run: Callable[[Arrays, ByIndex], tuple[Arrays, ByIndex]],
) -> tuple[Arrays, ByIndex]:
    """Returns the results of a step with a body, and the records of its uses.

    `run(inputs, by_use)` runs the body once.
    """
    params, body = step.eqn.params, step.body
    assert body is not None
    use_arrays = {use.index: by_use[use.index] for use in body.uses()}
    if step.scan_id is not None:
        return _scan(step, operands, use_arrays, run)
    # A checkpoint again, so that the backward pass saves as much memory as that of the loss.
    run = jax.checkpoint(run, prevent_cse=params["prevent_cse"], policy=params["policy"])
    return run(operands, use_arrays)


def _scan(
    step: ProgramStep,
    operands: Arrays,
    use_arrays: ByIndex,
    run: Callable[[Arrays, ByIndex], tuple[Arrays, ByIndex]],
) -> tuple[Arrays, ByIndex]:
    """Runs a scan, which slices the arrays of uses and stacks their records."""
    first, last = step.carry.start, step.carry.stop

    def one_step(carry: Arrays, inputs: PyTree) -> PyTree:
        slices, use_arrays = inputs
        # The inputs of the body are constants, carry and slices. Its outputs are carry and results.
        outputs, records = run([*operands[:first], *carry, *slices], use_arrays)
        return outputs[: last - first], (outputs[last - first :], records)

    params = step.eqn.params
    carry, (stacked, records) = lax.scan(
        one_step,
        operands[first:last],
        (operands[last:], use_arrays),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked], records


def constant_array(value: Any, aval: ShapedArray) -> jax.Array:
    """Returns a constant of a trace as an array of its type."""
    extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return value if extended else jnp.asarray(value, aval.dtype)


class ParameterEvaluator:
    """Computes and caches derived values at given parameters.

    Values inside scans have all steps stacked along leading axes.
    """

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.leaves = leaves
        self.values: dict[DerivedValue, jax.Array] = {}
        self.results: dict[ProgramStep, tuple[jax.Array, ...]] = {}

    def __call__(self, derived: DerivedValue) -> jax.Array:
        """Returns a value. Not recursive, since programs nest deeper than Python's stack."""
        stack = [derived]
        while stack:
            top = stack[-1]
            missing = [] if top in self.values else self.compute(top)
            stack.extend(missing)
            if not missing:
                stack.pop()
        return self.values[derived]

    def compute(self, derived: DerivedValue) -> list[DerivedValue]:
        """Computes one value, or returns the values that must be computed before it."""
        match derived.origin:
            case Parameter(leaf):
                self.values[derived] = self.leaves[leaf]
            case Constant(value):
                self.values[derived] = constant_array(value, derived.aval)
            case ScanSlices(whole):
                if whole not in self.values:
                    return [whole]
                # The slices of all steps together are the stack itself.
                self.values[derived] = self.values[whole]
            case Result(step, index) as result:
                missing = [v for v in result.operands if v not in self.values]
                if missing:
                    return missing
                # A step is run once for all of its results.
                if step not in self.results:
                    self.results[step] = _run_all_steps(
                        result, [self.values[v] for v in result.operands]
                    )
                self.values[derived] = self.results[step][index]
        return []


def _run_all_steps(result: Result, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results of a step for all steps of the enclosing scans."""

    def one_step(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bind(result.step.eqn, operands)

    # Inner scans are mapped first, so that the axis of the outermost one leads.
    function = one_step
    for scan in sorted({scan for v in result.operands for scan in v.scans}, reverse=True):
        axes = [0 if scan in v.scans else None for v in result.operands]
        function = jax.vmap(function, in_axes=axes)
    return function(*operands)
