"""Reads a traced loss, and finds operations that combine parameters with data.

Every value of the program is either *derived* (a function of parameters and constants, the same for
all examples) or *private* (it may depend on the example). An operation on both is a *use* if it has
a rule and a gradient flows through it. Otherwise the parameters behind it become *opaque*:
automatic differentiation gives their per-example gradients.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace.activity import GradientFlow
from dpoptax._ghost_clipping.trace.check_loss import (
    check_parameters,
    check_scalar,
    constant_bytes,
    failure_note,
    warn_of_constants,
)
from dpoptax._ghost_clipping.trace.derived_values import constant_value, derive_values, open_program
from dpoptax._ghost_clipping.trace.entry_rules import Addition, Concatenation, Lookup
from dpoptax._ghost_clipping.trace.example_separation import (
    check_separate,
    converges_jointly_on_tpu,
    touches_reference,
)
from dpoptax._ghost_clipping.trace.examples import Examples
from dpoptax._ghost_clipping.trace.program import (
    Block,
    Constant,
    DerivedValue,
    Parameter,
    PrivateValue,
    Program,
    ScanSlices,
    Step,
    Use,
    Value,
)
from dpoptax._ghost_clipping.trace.rules import Convolution, Dot, Rule, is_real
from dpoptax._ghost_clipping.trace.views import View
from dpoptax._ghost_clipping.trace.zero_gradients import find_vanishing, warn_of_vanishing
from dpoptax._jaxprs import INLINED_CALLS, REMATERIALIZED_CALLS, scan_parts, type_of
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree

Values: TypeAlias = Sequence[Value]
# (scan_id, length) of each enclosing scan, outermost first.
Loops: TypeAlias = tuple[tuple[int, int], ...]

# For these, the gradient of a parameter is at most as large as a part of the output.
_ELEMENTWISE_PRIMITIVES = {"add", "sub", "mul", "div", "concatenate"}
_CONTRACTION_RULES: dict[str, type[Dot | Convolution]] = {
    "dot_general": Dot,
    "conv_general_dilated": Convolution,
}


def read_batch_program(
    loss_fn: Callable[..., PyTree],
    points: GradientPoints,
    examples: Examples,
    *,
    has_aux: bool,
) -> Program:
    """Reads the program of one of the examples.

    Warns of gradients that are always zero, and of large constants.
    """
    example, key = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (examples.batch, examples.keys)
    )
    params, has_tangent = points.points[0], points.tangent is not None
    program = read_program(loss_fn, params, example, key, has_aux=has_aux, has_tangent=has_tangent)
    warn_of_vanishing(program, params)
    warn_of_constants(program.constant_bytes)
    return program


def read_program(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    example: PyTree,
    key: jax.Array | jax.ShapeDtypeStruct | None,
    *,
    has_aux: bool,
    has_tangent: bool = False,
) -> Program:
    """Traces `loss_fn(params, example[, key])` and reads the program.

    Raises an error if the loss may mix examples. The arguments are arrays or shape structs of one
    example. `key` is `None` for a loss without randomness. `has_tangent` says whether a
    Hessian-vector product is added, as for `disk(gamma=0)`. The gradient is then differentiated
    once more.
    """
    check_parameters(params)
    inputs = (example,) if key is None else (example, key)
    derivatives = 2 if has_tangent else 1
    closed, shapes = _trace_loss(loss_fn, params, inputs, has_aux=has_aux, derivatives=derivatives)
    count = len(jax.tree.leaves(params))
    args: list[Value] = []
    for i, var in enumerate(closed.jaxpr.invars):
        if i < count:
            aval = type_of(var)
            view = View.identity(i, tuple(aval.shape))
            flows = frozenset({i} if aval.size else ())
            args.append(DerivedValue(aval, Parameter(i), flows, True, view=view))
        else:
            args.append(PrivateValue(type_of(var), varies=False))
    parameters = tuple(type_of(var) for var in closed.jaxpr.invars[:count])
    reader = _Reader()
    block = reader.read(closed.jaxpr, [constant_value(c) for c in closed.consts], args, ())
    active = GradientFlow()
    to_loss = [True] + [False] * (len(block.results) - 1)
    active.flow_through(block, to_loss)
    vanishing, zeros = find_vanishing(block, active, to_loss)
    finder = _UseFinder(parameters, active)
    finder.find(block)
    # A loss that depends on parameters only is a derived value without uses.
    finder.mark_opaque(block.results[:1], "the loss itself")
    if reader.references:  # the values do not show that one step writes and another reads
        finder.mark_opaque(args, "a jax.Ref")
    return Program(
        block,
        parameters,
        tuple(finder.uses),
        {leaf: tuple(reasons) for leaf, reasons in finder.opaque.items()},
        frozenset(set(finder.opaque) - finder.beyond_elementwise),
        jax.tree.structure(shapes),
        vanishing,
        zeros,
        constant_bytes(closed),
        converges_jointly_on_tpu(closed.jaxpr),
    )


def _trace_loss(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    inputs: tuple[PyTree, ...],
    *,
    has_aux: bool,
    derivatives: int,
) -> tuple[ClosedJaxpr, tuple[PyTree, PyTree]]:
    """Returns the checked program of a loss, and the shapes of (loss, aux)."""

    def flat(params: PyTree, example: PyTree, *key: jax.Array) -> tuple[PyTree, PyTree]:
        try:
            out = loss_fn(params, example, *key)
        except Exception as error:
            error.add_note(failure_note(error, example, bool(key)))
            raise
        return out if has_aux else (out, None)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(params, *inputs)
    check_scalar(shapes, has_aux)
    check_separate(closed, len(jax.tree.leaves(params)), derivatives)
    return closed, shapes


class _Reader:
    """Sorts the values of a jaxpr into derived and private, and turns it into steps."""

    def __init__(self) -> None:
        self.scan_count = 0
        self.references = False  # whether the program reads or writes a jax.Ref that it made

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
            return list(derive_values(eqn, derived))
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
            block.steps.append(Step(eqn, operands, outputs, loops))
        return list(outputs)

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


class _UseFinder:
    """Finds the uses of parameters, and the opaque parameters.

    Attributes:
      uses: the uses found.
      opaque: the parameters that operations without a rule combine with data, and these operations.
      beyond_elementwise: the opaque parameters that do more than scale and shift data.
    """

    def __init__(self, parameters: tuple[ShapedArray, ...], active: GradientFlow) -> None:
        self.parameters = parameters
        self.active = active
        self.opaque: dict[int, list[str]] = {}
        self.beyond_elementwise: set[int] = set()
        self.uses: list[Use] = []

    def mark_opaque(self, values: Iterable[Value], reason: str, reach: int = 0) -> None:
        """Records that an operation with `reach` output entries makes parameters opaque."""
        for value in values:
            if isinstance(value, DerivedValue):
                for leaf in value.leaves:
                    reasons = self.opaque.setdefault(leaf, [])
                    if reason not in reasons:
                        reasons.append(reason)
                    if reason not in _ELEMENTWISE_PRIMITIVES or self.parameters[leaf].size > reach:
                        self.beyond_elementwise.add(leaf)

    def find(self, block: Block) -> None:
        """Records the uses and opaque parameters of a block."""
        block.steps = [self.visit(s) if s in self.active.steps else s for s in block.steps]

    def visit(self, step: Step) -> Step:
        if step.body is None:
            return self.find_use(step)
        if step.scan_id is not None:
            outputs, carried = self.active.scanned(step)
            flows = [*carried, *outputs[len(carried) :]]
            self.mark_opaque(
                itertools.compress(step.operands[step.carry], carried), "the carry of scan"
            )
            self.mark_opaque(itertools.compress(step.body.results, flows), "the results of scan")
        self.find(step.body)
        return step

    def find_use(self, step: Step) -> Step:
        """Returns the step with its use, or marks its parameters as opaque."""
        eqn, operands = step.eqn, step.operands
        flowing = [i for i, v in enumerate(operands) if isinstance(v, DerivedValue) and v.leaves]
        if not flowing:
            return step
        private = [isinstance(v, PrivateValue) for v in operands]
        found = _find_rule(eqn, private, [self.is_part(v) for v in operands])
        if found and flowing == [found[1]]:
            rule, parameter, data = found
            value = operands[parameter]
            assert isinstance(value, DerivedValue)
            if not value.nonlinear:
                around = tuple((length, scan_id in value.scans) for scan_id, length in step.loops)
                read = operands[data]
                read_varies = rule.reads_data and isinstance(read, PrivateValue) and read.varies
                output = type_of(eqn.outvars[0])
                use = Use(len(self.uses), rule, value, output, around, read_varies)
                self.uses.append(use)
                return dataclasses.replace(step, use=use, data=data)
            self.mark_opaque([value], value.nonlinear)
            return step
        steps = math.prod(length for _, length in step.loops)
        reach = max(v.aval.size for v in step.outputs)
        self.mark_opaque(operands, eqn.primitive.name, steps * reach)
        return step

    def is_part(self, value: Value) -> bool:
        """Returns whether a value holds some but not all entries of one parameter."""
        if not isinstance(value, DerivedValue) or value.view is None:
            return False
        return math.prod(value.view.shape) < self.parameters[value.view.leaf].size


def _find_rule(
    eqn: JaxprEqn, private: list[bool], parts: list[bool]
) -> tuple[Rule, int, int] | None:
    """Returns a use's rule, and the positions of the parameter and the data operand.

    `private[i]` says whether operand i depends on data. `parts[i]` says whether it holds some but
    not all entries of one parameter.
    """
    name = eqn.primitive.name
    floats = [*eqn.outvars, *(eqn.invars if name in _CONTRACTION_RULES else ())]
    if not eqn.outvars or not all(is_real(v.aval.dtype) for v in floats):
        return None
    rule: Rule | None = None
    if name in _CONTRACTION_RULES:
        parameter, data = private.index(False), private.index(True)
        rule = _CONTRACTION_RULES[name].build(eqn, parameter)
    elif name == "gather" and not private[0]:
        parameter, data = 0, 1
        rule = Lookup.build_gather(eqn)
    elif name == "dynamic_slice" and not private[0] and sum(private) == 1:
        parameter, data = 0, private.index(True)
        rule = Lookup.build_slice(eqn, data - 1)
    # The last two rules only apply to parts of a parameter. The gradient of a part is smaller than
    # that of the whole parameter, which an opaque parameter would need for each example. If a whole
    # parameter is added or concatenated, its gradient is at most as large as the cotangent, so a
    # rule would save nothing.
    elif name in ("add", "sub") and any(parts):
        parameter = parts.index(True)
        data = 1 - parameter
        rule = Addition.build(eqn, parameter)
    elif name == "concatenate" and any(parts):
        parameter, data = parts.index(True), private.index(True)
        rule = Concatenation.build(eqn, parameter)
    return None if rule is None else (rule, parameter, data)
