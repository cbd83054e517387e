"""Reads a traced loss: which values are made of parameters alone, and where they meet data.

Every value of the program is either *derived* (a function of parameters and constants: the same
for all examples) or *private* (it may depend on the example). Where a derived value meets a
private one in an operation that `rules` knows, and a gradient flows there, that is a use. Anywhere
else the parameters behind it become *opaque*: the only way to their gradients is automatic
differentiation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace import rules
from dpoptax._ghost_clipping.trace.activity import Activity
from dpoptax._ghost_clipping.trace.derived_values import derive, known, open_program
from dpoptax._ghost_clipping.trace.example_separation import check_separate, touches_reference
from dpoptax._ghost_clipping.trace.find_uses import Finder
from dpoptax._ghost_clipping.trace.program import (
    Block,
    Constant,
    Derived,
    Parameter,
    Private,
    Program,
    Step,
    StepsOf,
    Value,
    scan_parts,
    type_of,
)
from dpoptax._ghost_clipping.trace.views import View
from dpoptax._ghost_clipping.trace.zero_gradients import find_vanishing
from dpoptax._tree import PyTree, check_arrays, is_variable, nnx_kinds

# (scan, length) of each scan around, outermost first.
Loops: TypeAlias = tuple[tuple[int, int], ...]

_INLINE = {"jit", "pjit", "closed_call", "core_call"}
_REMAT = {"checkpoint", "remat", "remat2"}


class _Reader:
    """Follows the values of a program into steps."""

    def __init__(self) -> None:
        self.scans = 0
        self.references = False  # whether the program reads or writes a jax.Ref of its own

    def read(
        self, jaxpr: Jaxpr, consts: Sequence[Value], args: Sequence[Value], loops: Loops
    ) -> Block:
        block = Block([v for v in args if isinstance(v, Private)])
        block.results = self.extend(block, jaxpr, [*consts, *args], loops)
        return block

    def extend(
        self, block: Block, jaxpr: Jaxpr, args: Sequence[Value], loops: Loops
    ) -> list[Value]:
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def value(atom: Var | Literal) -> Value:
            if isinstance(atom, Literal):
                return Derived(type_of(atom), Constant(atom.val))
            return names[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(value(v) for v in eqn.invars)
            for var, out in zip(eqn.outvars, self.step(block, eqn, operands, loops), strict=True):
                names[var] = out
        return [value(v) for v in jaxpr.outvars]

    def step(
        self, block: Block, eqn: JaxprEqn, operands: tuple[Value, ...], loops: Loops
    ) -> list[Value]:
        name = eqn.primitive.name
        if name in _INLINE:
            called = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
            inner, consts = open_program(eqn.params[called])
            return self.extend(block, inner, [*consts, *operands], loops)
        self.references |= touches_reference(eqn.effects)
        derived = tuple(v for v in operands if isinstance(v, Derived))
        if not eqn.effects and len(derived) == len(operands):
            return list(derive(eqn, derived))
        varies = any(v.varies for v in operands)
        outputs = tuple(Private(type_of(v), varies) for v in eqn.outvars)
        if name == "scan":
            block.steps.append(self.scan(eqn, operands, outputs, loops))
        elif name in _REMAT:
            inner, consts = open_program(eqn.params["jaxpr"])
            body = self.read(inner, consts, operands, loops)
            block.steps.append(Step(eqn, operands, outputs, loops, body=body))
            return [
                inside if isinstance(inside, Derived) else out
                for inside, out in zip(body.results, outputs, strict=True)
            ]
        else:
            block.steps.append(Step(eqn, operands, outputs, loops))
        return list(outputs)

    def scan(
        self,
        eqn: JaxprEqn,
        operands: tuple[Value, ...],
        outputs: tuple[Private, ...],
        loops: Loops,
    ) -> Step:
        p = eqn.params
        scan, self.scans = self.scans, self.scans + 1
        n_consts, n_carry = scan_parts(eqn)
        inner, consts = open_program(p["jaxpr"])
        args: list[Value] = []
        for i, (outer, var) in enumerate(zip(operands, inner.invars, strict=True)):
            if n_consts <= i < n_consts + n_carry:
                args.append(Private(type_of(var)))
            elif isinstance(outer, Private):
                args.append(Private(type_of(var), outer.varies))
            elif i < n_consts:
                args.append(outer)
            else:
                step = dataclasses.replace(
                    outer, aval=type_of(var), scans=(*outer.scans, scan), origin=StepsOf(outer)
                )
                args.append(step)
        body = self.read(inner, consts, args, (*loops, (scan, p["length"])))
        return Step(eqn, operands, outputs, loops, body=body, scan=scan)


def check_parameters(params: PyTree) -> None:
    """Raises a TypeError where parameters are anything but real floats of 16 bits or more."""
    _check_variables(params)
    check_arrays(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jax.typeof(leaf).dtype
        if rules.is_real(dtype):
            continue
        remedy = (
            "has no gradient: close loss_fn over it, and leave it out of the parameters, which are "
            "the second argument of dpoptax.gradient_points(opt_state, params)"
        )
        if jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = "cannot be clipped: hold its real and its imaginary part as two parameters"
        elif rules.is_narrow(dtype):
            remedy = (
                "is too narrow for a gradient: hold it in bfloat16 or wider, cast it in loss_fn"
            )
        name = jax.tree_util.keystr(path) or "the parameter"
        raise TypeError(f"params: {name} of dtype {dtype} {remedy}")


def _check_variables(params: PyTree) -> None:
    """Raises where a variable of flax.nnx is none that is trained, such as BatchNorm's statistics.

    A user's own kinds of variables are left alone.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_variable):
        kind = type(leaf).__name__
        if is_variable(leaf) and kind in nnx_kinds(leaf) and "Param" not in nnx_kinds(leaf):
            raise TypeError(
                f"params: {jax.tree_util.keystr(path)} is an nnx.{kind}, which is not trained: "
                "take graph, params, rest = nnx.split(model, nnx.Param, ...), and in loss_fn "
                "nnx.merge(graph, params, rest)"
            )


def _of_one(error: Exception, example: PyTree, keyed: bool) -> str:
    """What to know where a loss fails: that it was perhaps written for a batch, or wants a key."""
    if type(error).__name__ == "TraceContextError":
        return (
            "dpoptax: loss_fn is a function of parameters and one example, and a module in it "
            "changes a state of its own. Take nnx.GroupNorm or nnx.LayerNorm for nnx.BatchNorm; "
            "make nnx.Dropout without rngs and give it nnx.Rngs(key) where it is called, with the "
            "key of loss_fn(params, example, key). For a model that was made with rngs take graph, "
            "params, rest = nnx.split(model, nnx.Param, ...), and in loss_fn "
            "m = nnx.merge(graph, params, rest, copy=True) and nnx.reseed(m, default=key), with a "
            "keyword for each stream of the model, such as dropout=key"
        )
    shapes = jax.tree.map(lambda x: tuple(jnp.shape(x)), example)
    note = (
        f"dpoptax: loss_fn is called as loss_fn(params, example{', key' * keyed}), with one "
        f"example, the arrays of a batch without their first axis, of shapes {shapes}. A model "
        "that wants a batch gets one of a single example by "
        "jax.tree.map(lambda x: x[None], example)"
    )
    if keyed:
        return note
    return note + "; a loss with randomness gets a key by grad_fn(..., key=key, ids=indices)"


def _check_scalar(shapes: PyTree, has_aux: bool) -> None:
    """Raises where what a loss returned, as shapes, is no scalar, or no (scalar, aux)."""
    if has_aux and not (isinstance(shapes, tuple | list) and len(shapes) == 2):
        raise TypeError(
            "has_aux=True, and loss_fn returned no pair (loss, aux); return one, or leave has_aux "
            "out"
        )
    value = shapes[0]
    is_array = isinstance(value, jax.ShapeDtypeStruct)
    if not is_array or value.shape != ():
        found = f"has shape {value.shape}" if is_array else f"is a {type(value).__name__}"
        raise TypeError(
            f"loss_fn must return a scalar for one example, but its value {found}; reduce it, or "
            "set has_aux=True if it returns (loss, aux)"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"loss_fn must return a real number, but its value is of {value.dtype}, which has no "
            "gradient"
        )


def trace_loss(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    example: PyTree,
    key: jax.Array | jax.ShapeDtypeStruct | None,
    *,
    has_aux: bool,
    tangent: bool = False,
) -> tuple[ClosedJaxpr, tuple[PyTree, PyTree]]:
    """Traces `loss_fn(params, example[, key])` on shapes; raises where it may mix examples.

    The arguments are arrays or shape structs of one example; `key` is None where there is none, and
    with a `tangent` the gradient is differentiated once more.

    Returns:
      The program, and the shapes of its results, (loss, aux).
    """
    extra = () if key is None else (key,)

    def flat(params: PyTree, example: PyTree, *key: jax.Array) -> tuple[PyTree, PyTree]:
        try:
            out = loss_fn(params, example, *key)
        except Exception as error:
            error.add_note(_of_one(error, example, bool(key)))
            raise
        return out if has_aux else (out, None)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(params, example, *extra)
    _check_scalar(shapes, has_aux)
    check_separate(closed, len(jax.tree.leaves(params)), 2 if tangent else 1)
    return closed, shapes


def read_program(
    loss_fn: Callable[..., PyTree],
    params: PyTree,
    example: PyTree,
    key: jax.Array | jax.ShapeDtypeStruct | None,
    *,
    has_aux: bool,
    tangent: bool = False,
) -> Program:
    """Traces a loss, as `trace_loss` does, and reads it."""
    check_parameters(params)
    closed, shapes = trace_loss(loss_fn, params, example, key, has_aux=has_aux, tangent=tangent)
    count = len(jax.tree.leaves(params))
    args: list[Value] = []
    for i, var in enumerate(closed.jaxpr.invars):
        if i < count:
            aval = type_of(var)
            view = View.whole(i, tuple(aval.shape))
            flows = frozenset({i} if aval.size else ())
            args.append(Derived(aval, Parameter(i), flows, True, view=view))
        else:
            args.append(Private(type_of(var), varies=False))
    parameters = tuple(type_of(var) for var in closed.jaxpr.invars[:count])
    reader = _Reader()
    block = reader.read(closed.jaxpr, [known(c) for c in closed.consts], args, ())
    active = Activity()
    to_loss = [True] + [False] * (len(block.results) - 1)
    active.flow_through(block, to_loss)
    vanishing, zeros = find_vanishing(block, active, to_loss)
    finder = Finder(parameters, active)
    finder.find(block)
    finder.mark_opaque(block.results[:1], "the loss itself")
    if reader.references:  # what one step writes another reads, and no value says so
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
    )
