"""Reads a traced loss, and finds operations that combine parameters with data.

Every value of the program is either *derived* (a function of parameters and constants, the same for
all examples) or *private* (it may depend on the example). An operation on both is a *use* if it has
a rule and a gradient flows through it. Otherwise the parameters behind it become *opaque*:
automatic differentiation gives their per-example gradients.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dpoptax._gradients.ghost_clipping.trace.derived_values import (
    constant_value,
    derive_values,
    open_program,
)
from dpoptax._gradients.ghost_clipping.trace.example_separation import touches_reference
from dpoptax._gradients.ghost_clipping.trace.find_uses import GradientFlow, UseFinder
from dpoptax._gradients.ghost_clipping.trace.program import (
    Block,
    Constant,
    DerivedValue,
    Operation,
    Parameter,
    PrivateValue,
    Program,
    Result,
    ScanSlices,
    Step,
    Value,
)
from dpoptax._gradients.ghost_clipping.trace.trace_loss import TracedLoss
from dpoptax._gradients.ghost_clipping.trace.views import View
from dpoptax._support.jaxprs import INLINED_CALLS, REMATERIALIZED_CALLS, scan_parts, type_of

Values: TypeAlias = Sequence[Value]
# (scan_id, length) of each enclosing scan, outermost first.
Loops: TypeAlias = tuple[tuple[int, int], ...]


def read_program(loss: TracedLoss) -> Program:
    """Reads the program of a loss."""
    jaxpr, count = loss.program.jaxpr, loss.parameters
    parameters = tuple(type_of(var) for var in jaxpr.invars[:count])
    args: list[Value] = [
        *map(_parameter, range(count), parameters),
        *map(_input, jaxpr.invars[count:]),
    ]
    reader = _Reader()
    block = reader.read(jaxpr, [constant_value(c) for c in loss.program.consts], args, ())
    finder = UseFinder(parameters, GradientFlow.from_loss(block))
    finder.find(block)
    # A loss that depends on parameters only is a derived value without uses.
    finder.mark_opaque(block.results[:1], "the loss itself")
    if reader.references:  # the values do not show that one step writes and another reads
        finder.mark_opaque(args, "a jax.Ref")
    return Program(
        loss,
        block,
        parameters,
        tuple(finder.uses),
        {leaf: tuple(reasons) for leaf, reasons in finder.opaque.items()},
        frozenset(set(finder.opaque) - finder.beyond_elementwise),
    )


def _parameter(leaf: int, aval: ShapedArray) -> DerivedValue:
    view = View.identity(leaf, tuple(aval.shape))
    flows = frozenset({leaf} if aval.size else ())
    return DerivedValue(aval, Parameter(leaf), flows, True, view=view)


def _input(var: Var) -> PrivateValue:
    return PrivateValue(type_of(var), varies=False)


def _result_of(value: Value) -> Result | None:
    """Returns the result of an operation that a value is, or `None`."""
    origin = value.origin if isinstance(value, DerivedValue) else None
    return origin if isinstance(origin, Result) else None


class _Reader:
    """Sorts the values of a jaxpr into derived and private, and turns it into steps."""

    def __init__(self) -> None:
        self.scan_count = 0
        self.references = False  # whether the program reads or writes a jax.Ref that it made
        # For each scan body, the operations on constants in it, and their results where computed.
        self.constants: dict[Loops, dict[Operation, None]] = collections.defaultdict(dict)
        self.computed: dict[tuple[Block, Operation], tuple[PrivateValue, ...]] = {}

    def read(self, jaxpr: Jaxpr, consts: Values, args: Values, loops: Loops) -> Block:
        block = Block([v for v in args if isinstance(v, PrivateValue)])
        block.results = self.extend(block, jaxpr, [*consts, *args], loops)
        return block

    def extend(self, block: Block, jaxpr: Jaxpr, args: Values, loops: Loops) -> list[Value]:
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def value(atom: Var | Literal) -> Value:
            if isinstance(atom, Literal):
                return DerivedValue(type_of(atom), Constant(atom.val))
            return names[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(value(v) for v in eqn.invars)
            results = self.read_equation(block, eqn, operands, loops)
            for var, out in zip(eqn.outvars, results, strict=True):
                names[var] = out
        return [value(v) for v in jaxpr.outvars]

    def read_equation(
        self, block: Block, eqn: JaxprEqn, operands: tuple[Value, ...], loops: Loops
    ) -> list[Value]:
        name = eqn.primitive.name
        if name in INLINED_CALLS:
            called = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
            inner, consts = open_program(eqn.params[called])
            return self.extend(block, inner, [*consts, *operands], loops)
        self.references |= touches_reference(eqn.effects)
        derived = tuple(v for v in operands if isinstance(v, DerivedValue))
        # No operand depends on the example, so the value is computed once for all examples.
        if not eqn.effects and len(derived) == len(operands):
            results: list[Value] = list(derive_values(eqn, derived))
            if loops and not any(v.varies for v in derived):
                origins = filter(None, map(_result_of, results))
                self.constants[loops].update((origin.operation, None) for origin in origins)
            return results
        varies = any(v.varies for v in operands)
        outputs = tuple(PrivateValue(type_of(v), varies) for v in eqn.outvars)
        if name == "scan":
            block.steps.append(self.read_scan(eqn, operands, outputs, loops))
        elif name in REMATERIALIZED_CALLS:
            inner, consts = open_program(eqn.params["jaxpr"])
            body = self.read(inner, consts, operands, loops)
            block.steps.append(Step(eqn, operands, outputs, loops, body=body))
            return [
                inside if isinstance(inside, DerivedValue) else out
                for inside, out in zip(body.results, outputs, strict=True)
            ]
        else:
            if loops and not any(v.varies for v in derived):
                operands = self.compute_constants(block, operands, loops)
            block.steps.append(Step(eqn, operands, outputs, loops))
        return list(outputs)

    def compute_constants(self, block: Block, operands: Values, loops: Loops) -> tuple[Value, ...]:
        """Replaces constants of a scan's body by values that a step of the body computes.

        Derived values are computed outside of scans, for all steps at once. This would store, for
        example, the masks of an attention for all blocks of queries.
        """
        here, needed = self.constants[loops], set[Operation]()
        stack = list(operands)
        while stack:
            origin = _result_of(stack.pop())
            if origin and origin.operation in here and origin.operation not in needed:
                needed.add(origin.operation)
                stack += origin.operation.operands

        def computed(value: Value) -> Value:
            origin = _result_of(value)
            outputs = self.computed.get((block, origin.operation)) if origin else None
            return outputs[origin.index] if origin and outputs else value

        for operation in self.constants[loops] if needed else ():
            if operation in needed and (block, operation) not in self.computed:
                eqn, inputs = operation.eqn, tuple(map(computed, operation.operands))
                outputs = tuple(PrivateValue(type_of(v), varies=False) for v in eqn.outvars)
                self.computed[block, operation] = outputs
                block.steps.append(Step(eqn, inputs, outputs, loops))
        return tuple(map(computed, operands))

    def read_scan(
        self,
        eqn: JaxprEqn,
        operands: tuple[Value, ...],
        outputs: tuple[PrivateValue, ...],
        loops: Loops,
    ) -> Step:
        p = eqn.params
        scan_id, self.scan_count = self.scan_count, self.scan_count + 1
        n_consts, n_carry = scan_parts(eqn)
        inner, consts = open_program(p["jaxpr"])
        args: list[Value] = []
        for i, (outer, var) in enumerate(zip(operands, inner.invars, strict=True)):
            # A carry may depend on the example after the first step, so it is always private.
            if n_consts <= i < n_consts + n_carry:
                args.append(PrivateValue(type_of(var)))
            elif isinstance(outer, PrivateValue):
                args.append(PrivateValue(type_of(var), outer.varies))
            elif i < n_consts:
                args.append(outer)
            else:
                slices = dataclasses.replace(
                    outer,
                    aval=type_of(var),
                    scans=(*outer.scans, scan_id),
                    origin=ScanSlices(outer),
                )
                args.append(slices)
        body = self.read(inner, consts, args, (*loops, (scan_id, p["length"])))
        return Step(eqn, operands, outputs, loops, body=body, scan_id=scan_id)
