"""Runs the steps of a traced program for one example.

`make_environment` computes the derived values, which are the same for all examples. `Interpreter`
runs the steps, which read these values and the example.
"""

from collections.abc import Sequence
from typing import Any, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray

from dpoptax._gradients.ghost_clipping.trace.program import (
    Block,
    Constant,
    DerivedValue,
    Operation,
    Parameter,
    Program,
    Result,
    ScanSlices,
    Step,
    Use,
    Value,
)
from dpoptax._support.jaxprs import bind
from dpoptax._support.tree import PyTree

# The derived values that a block reads, by (value, shifted). For shifted values, zeros are added to
# opaque parameters, so that gradients flow to these zeros.
Environment: TypeAlias = dict[tuple[DerivedValue, bool], jax.Array]
Arrays: TypeAlias = list[jax.Array]
# Arrays by the index of their use or parameter.
ByIndex: TypeAlias = dict[int, Any]


class Interpreter:
    """Runs the steps of a block. Subclasses define how uses of parameters are run.

    Attributes:
      by_use: an array for each use, with a leading axis for each scan that is not yet entered.
      known: the values that are derived from parameters.
      records: arrays that subclasses keep for each use. Scans stack them.
    """

    def __init__(self, by_use: ByIndex, known: Environment) -> None:
        self.by_use = by_use
        self.known = known
        self.records: ByIndex = {}

    def use(self, step: Step, use: Use, operands: Arrays) -> jax.Array:
        """Returns the output of a use."""
        raise NotImplementedError

    def inner(self, by_use: ByIndex, known: Environment) -> Self:
        """Returns the interpreter for the body of a scan or of `jax.checkpoint`."""
        raise NotImplementedError

    def run(self, block: Block, inputs: Sequence[jax.Array]) -> Arrays:
        values: dict[Value, jax.Array] = dict(zip(block.inputs, inputs, strict=True))

        def read(value: Value, shifted: bool) -> jax.Array:
            return self.known[value, shifted] if isinstance(value, DerivedValue) else values[value]

        for step in block.steps:
            # A use reads unshifted parameters. Operand and cotangent give its part of the gradient,
            # which must not be counted again in the gradient of an opaque parameter.
            operands = [read(v, step.use is None) for v in step.operands]
            outputs: Sequence[jax.Array]
            if step.use is not None:
                outputs = [self.use(step, step.use, operands)]
            elif step.body is None:
                outputs = bind(step.eqn, operands)
            elif step.scan_id is not None:
                outputs = self.scan(step, operands)
            else:
                outputs = self.rematerialize(step, operands)
            values.update(zip(step.outputs, outputs, strict=True))
        return [read(v, True) for v in block.results]

    def rematerialize(self, step: Step, operands: Arrays) -> Arrays:
        body = step.body
        assert body is not None
        private = [
            x
            for v, x in zip(step.operands, operands, strict=True)
            if not isinstance(v, DerivedValue)
        ]
        own = {u.index: self.by_use[u.index] for u in body.uses()}

        def call(inputs: Arrays, by_use: ByIndex) -> tuple[Arrays, ByIndex]:
            inner = self.inner(by_use, self.known)
            return inner.run(body, inputs), inner.records

        params = step.eqn.params
        call = jax.checkpoint(call, prevent_cse=params["prevent_cse"], policy=params["policy"])
        outputs, records = call(private, own)
        self.records.update(records)
        return outputs

    def scan(self, step: Step, operands: Arrays) -> Arrays:
        assert step.body is not None
        p, body, scan_id = step.eqn.params, step.body, step.scan_id
        first, last = step.carry.start, step.carry.stop
        private = [not isinstance(v, DerivedValue) for v in step.operands]
        consts = [x for x, is_private in zip(operands[:first], private, strict=False) if is_private]
        xs = [x for x, ok in zip(operands[last:], private[last:], strict=True) if ok]
        stacked = {k: self.known[k] for k in body.needs() if scan_id in k[0].scans}
        keys = list(stacked)
        own = {u.index: self.by_use[u.index] for u in body.uses()}

        def one_step(carry: Arrays, inputs: PyTree) -> PyTree:
            xs, slices, by_use = inputs
            # The scan slices derived values of stacked parameters, and closes over all others.
            known = {**self.known, **dict(zip(keys, slices, strict=True))}
            inner = self.inner(by_use, known)
            outputs = inner.run(body, [*consts, *carry, *xs])
            return outputs[: len(carry)], (outputs[len(carry) :], inner.records)

        carry, (ys, records) = lax.scan(
            one_step,
            operands[first:last],
            (xs, [stacked[k] for k in keys], own),
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        self.records.update(records)
        return [*carry, *ys]


def make_environment(program: Program, leaves: Arrays, zeros: ByIndex) -> Environment:
    """Returns the derived values that a program reads, shifted or not.

    For shifted values, `zeros` are added to opaque parameters.
    """
    shifted = [x + zeros[i] if i in zeros else x for i, x in enumerate(leaves)]
    opaque = set(program.opaque)
    evaluate, evaluate_shifted = ParameterEvaluator(leaves), ParameterEvaluator(shifted)
    return {
        (v, is_shifted): evaluate_shifted(v) if is_shifted and v.leaves & opaque else evaluate(v)
        for v, is_shifted in program.block.needs()
    }


def opaque_zeros(program: Program, batch_size: int) -> ByIndex:
    """Returns zeros (B, …) for each opaque parameter."""
    return {
        i: jnp.zeros((batch_size, *program.parameters[i].shape), program.parameters[i].dtype)
        for i in program.opaque
    }


class ParameterEvaluator:
    """Computes and caches derived values at given parameters.

    Values inside scans have all steps stacked along leading axes.
    """

    def __init__(self, leaves: list[jax.Array]) -> None:
        self.leaves = leaves
        self.values: dict[DerivedValue, jax.Array] = {}
        self.results: dict[Operation, tuple[jax.Array, ...]] = {}

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
                self.values[derived] = _constant_array(value, derived.aval)
            case ScanSlices(whole):
                if whole not in self.values:
                    return [whole]
                self.values[derived] = self.values[whole]
            case Result(operation, index):
                missing = [v for v in operation.operands if v not in self.values]
                if missing:
                    return missing
                if operation not in self.results:
                    operands = [self.values[v] for v in operation.operands]
                    self.results[operation] = _apply_operation(operation, operands)
                self.values[derived] = self.results[operation][index]
        return []


def _constant_array(value: Any, aval: ShapedArray) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
        return value
    return jnp.asarray(value, aval.dtype)


def _apply_operation(operation: Operation, operands: list[jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the results of an operation for all steps of the enclosing scans."""

    def one_step(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return bind(operation.eqn, operands)

    function = one_step
    for scan in reversed(operation.scans):
        axes = [0 if scan in v.scans else None for v in operation.operands]
        function = jax.vmap(function, in_axes=axes)
    return function(*operands)
