"""Reads a traced loss, and finds operations that combine parameters with data.

Every value of the program is either *derived* (a function of parameters and constants, the same for
all examples) or *private* (it may depend on the example). One turn through the equations sorts the
values. A second one goes back from the loss and follows its gradient, which does not flow through
auxiliary outputs, comparisons and `stop_gradient`. Operands that only reach these must not be used,
because an infinite operand times a cotangent of zero is NaN.

An operation on derived and private values is a *use* if it has a rule and a gradient flows through
it. Otherwise the parameters behind it become *opaque*: automatic differentiation gives their
per-example gradients.

`find_uses` finds both. Rare cases are in other files: lookups and other operations on entries in
`entry_rules`, and used values that are computed from parameters in `derived_views`.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dpoptax import _losses
from dpoptax._losses.find_uses import UseFinder, has_derivative
from dpoptax._losses.trace_loss import TracedLoss
from dpoptax._losses.traced_program import (
    Block,
    Constant,
    DerivedValue,
    Loops,
    Parameter,
    PrivateValue,
    Program,
    ProgramStep,
    Result,
    ScanSlices,
    Value,
)
from dpoptax._support.jaxprs import (
    INLINED_CALLS,
    REMATERIALIZED_CALLS,
    carries_gradient,
    closed_program,
    type_of,
)

_BODIES = REMATERIALIZED_CALLS | {"scan"}


def read_program(loss: TracedLoss) -> Program:
    """Reads the program of a loss."""
    jaxpr, types = loss.program.jaxpr, [type_of(v) for v in loss.program.jaxpr.invars]
    parameters = tuple(types[: loss.parameters])
    args: list[Value] = [
        DerivedValue(aval, Parameter(leaf), frozenset({leaf} if aval.size else ()), True)
        for leaf, aval in enumerate(parameters)
    ]
    args += [PrivateValue(aval, varies=False) for aval in types[loss.parameters :]]
    reader = Reader()
    block = reader.read(jaxpr, loss.program.consts, args, ())
    finder, value = UseFinder(parameters), block.results[:1]
    finder.follow(block, value)
    # A loss that depends on parameters only is a derived value without uses.
    finder.meet_opaque(value, "the loss itself")
    if reader.references:  # the values do not show that one step writes and another reads
        finder.meet_opaque(args, "a jax.Ref")
    # The finder went backward. Messages name operations in the order of the program.
    opaque = {leaf: dict(reversed(found.items())) for leaf, found in sorted(finder.opaque.items())}
    used = set(opaque).union(*(use.value.leaves for use in finder.uses))
    unused = frozenset(leaf for leaf, aval in enumerate(parameters) if aval.size) - used
    uses = tuple(reversed(finder.uses))
    return Program(loss, block, parameters, uses, opaque, unused)


@dataclasses.dataclass(eq=False)
class Reader:
    """Sorts the values of a jaxpr into derived and private, and turns it into steps.

    Attributes:
      scan_count: the number of scans read so far.
      references: whether the program reads or writes a jax.Ref that it made.
    """

    scan_count: int = 0
    references: bool = False

    def read(
        self, jaxpr: Jaxpr, consts: Iterable[object], args: Sequence[Value], loops: Loops
    ) -> Block:
        """Returns the steps of a jaxpr, with all calls of other programs inlined."""
        block = Block(list(args))
        block.results = self.extend(block, jaxpr, consts, args, loops)
        return block

    def extend(
        self,
        block: Block,
        jaxpr: Jaxpr,
        consts: Iterable[object],
        args: Sequence[Value],
        loops: Loops,
    ) -> list[Value]:
        known = [
            DerivedValue(type_of(v), Constant(x))
            for v, x in zip(jaxpr.constvars, consts, strict=True)
        ]
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*known, *args], strict=True))

        def value(atom: Var | Literal) -> Value:
            if isinstance(atom, Literal):
                return DerivedValue(type_of(atom), Constant(atom.val))
            return names[atom]

        for eqn in jaxpr.eqns:
            outputs = self.read_equation(block, eqn, tuple(map(value, eqn.invars)), loops)
            names.update(zip(eqn.outvars, outputs, strict=True))
        return [value(v) for v in jaxpr.outvars]

    def read_equation(
        self, block: Block, eqn: JaxprEqn, operands: tuple[Value, ...], loops: Loops
    ) -> Sequence[Value]:
        """Adds the step of an equation to a block, and returns its results."""
        if eqn.primitive.name in INLINED_CALLS:
            return self.extend(block, *closed_program(eqn.params), operands, loops)
        step = ProgramStep(eqn, operands, loops)
        block.steps.append(step)
        # If no operand depends on the example, the results are the same for all examples.
        if not eqn.effects and all(isinstance(v, DerivedValue) for v in operands):
            step.outputs = _derive_values(step)
        elif eqn.primitive.name in _BODIES:
            if eqn.primitive.name == "scan":
                step.scan_id, self.scan_count = self.scan_count, self.scan_count + 1
            step.outputs = self.read_body(step)
        else:
            varies = any(v.varies for v in operands)
            # Programs of `cond` and `while` are not read: parameters that they combine with data
            # are opaque.
            step.outputs = tuple(PrivateValue(type_of(v), varies) for v in eqn.outvars)
        if eqn.effects:
            self.references |= _losses.example_separation.touches_reference(eqn.effects)
        return step.outputs

    def read_body(self, step: ProgramStep) -> tuple[Value, ...]:
        """Reads the body of a scan or a `jax.checkpoint`, and returns the results of the step."""
        inner, consts = closed_program(step.eqn.params)
        varies = any(v.varies for v in step.operands)
        private = [PrivateValue(type_of(v), varies) for v in step.eqn.outvars]
        if (scan := step.scan_id) is not None:
            loops = (*step.loops, (scan, step.eqn.params["length"]))
            inputs = [_scan_input(step, scan, i, type_of(v)) for i, v in enumerate(inner.invars)]
            step.body = self.read(inner, consts, inputs, loops)
            # Results of a scan are private, even if a step derives them from parameters only.
            # `UseFinder` makes these parameters opaque.
            return tuple(private)
        # A checkpoint may return derived values, which need no example to be computed.
        step.body = self.read(inner, consts, step.operands, step.loops)
        return tuple(
            inside if isinstance(inside, DerivedValue) else out
            for inside, out in zip(step.body.results, private, strict=True)
        )


def _scan_input(step: ProgramStep, scan_id: int, i: int, aval: ShapedArray) -> Value:
    """Returns an input of a scan's body, for operand i of the scan."""
    outer, carry = step.operands[i], step.carry
    # A carry may depend on the example after the first step, so it is always private.
    if carry.start <= i < carry.stop:
        return PrivateValue(aval)
    if isinstance(outer, PrivateValue):
        return PrivateValue(aval, outer.varies)
    # A constant of the scan is the same in all steps, and the rest are slices of a stack.
    if i < carry.start:
        return outer
    return dataclasses.replace(
        outer, aval=aval, scans=(*outer.scans, scan_id), origin=ScanSlices(outer)
    )


def _derive_values(step: ProgramStep) -> tuple[DerivedValue, ...]:
    """Returns the results of an operation on derived values."""
    operands = [v for v in step.operands if isinstance(v, DerivedValue)]
    leaves = frozenset[int]().union(*(v.leaves for v in operands if has_derivative(step)))
    varies = any(v.varies for v in operands)
    # Numbers grow from outer to inner scans, because `Reader` counts a scan before it reads the
    # body.
    scans = tuple(sorted({scan for v in operands for scan in v.scans}))
    types = [type_of(v) for v in step.eqn.outvars]
    flows = [leaves if carries_gradient(aval) else frozenset() for aval in types]
    return tuple(
        DerivedValue(aval, Result(step, i), own, varies, scans)
        for i, (aval, own) in enumerate(zip(types, flows, strict=True))
    )
