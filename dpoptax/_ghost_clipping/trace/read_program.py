"""Reads a traced loss, and finds operations that combine parameters with data.

Every value of the program is either *derived* (a function of parameters and constants, the same for
all examples) or *private* (it may depend on the example). An operation on both is a *use* if it has
a rule and a gradient flows through it. Otherwise the parameters behind it become *opaque*:
automatic differentiation gives their per-example gradients.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._clip.block_sums import WholeBatch
from dpoptax._ghost_clipping.trace.check_loss import (
    check_parameters,
    check_scalar,
    failure_note,
    warn_of_constants,
)
from dpoptax._ghost_clipping.trace.derived_values import constant_value, derive_values, open_program
from dpoptax._ghost_clipping.trace.example_separation import (
    check_separate,
    converges_jointly_on_tpu,
    touches_reference,
)
from dpoptax._ghost_clipping.trace.find_uses import GradientFlow, UseFinder
from dpoptax._ghost_clipping.trace.program import (
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
from dpoptax._ghost_clipping.trace.views import View
from dpoptax._ghost_clipping.trace.zero_gradients import warn_of_vanishing
from dpoptax._jaxprs import INLINED_CALLS, REMATERIALIZED_CALLS, scan_parts, type_of
from dpoptax._points import GradientPoints
from dpoptax._tree import PyTree

Values: TypeAlias = Sequence[Value]
# (scan_id, length) of each enclosing scan, outermost first.
Loops: TypeAlias = tuple[tuple[int, int], ...]


class Examples(NamedTuple):
    """Holds the examples that one device sums at once.

    Attributes:
      batch: the examples ξ_i, leaves (B, …).
      mask: (B,), True for examples and False for padding.
      keys: one key for each example, or `None`.
      whole_batch: the batch of all micro-batches and devices; `None` for these examples only.
    """

    batch: PyTree
    mask: jax.Array
    keys: jax.Array | None = None
    whole_batch: WholeBatch | None = None

    @property
    def whole(self) -> WholeBatch:
        """Returns the batch of all micro-batches and devices."""
        return self.whole_batch or WholeBatch(self.mask.shape[0])

    @property
    def inputs(self) -> list[jax.Array]:
        """Returns the arrays that are passed to the loss along with the parameters."""
        return jax.tree.leaves((self.batch, self.keys))


def read_batch_program(
    loss_fn: Callable[..., PyTree],
    points: GradientPoints,
    examples: Examples,
    *,
    has_aux: bool,
) -> Program:
    """Reads the program of one of the examples.

    Warns of gradients that are always zero.
    """
    example, key = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (examples.batch, examples.keys)
    )
    params, has_tangent = points.points[0], points.tangent is not None
    program = read_program(loss_fn, params, example, key, has_aux=has_aux, has_tangent=has_tangent)
    warn_of_vanishing(program, params)
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

    Raises an error if the loss may mix examples, and warns of large constants. The arguments are
    arrays or shape structs of one example. `key` is `None` for a loss without randomness.
    `has_tangent` says whether a Hessian-vector product is added, as for `disk(gamma=0)`. The
    gradient is then differentiated once more.
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
    finder = UseFinder(parameters, GradientFlow.from_loss(block))
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
    warn_of_constants(closed)
    return closed, shapes


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
            if not any(v.varies for v in derived):
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
