"""Reads a traced loss: which values are made of parameters alone, and where they meet data.

Every value of the program is either *derived* (a function of parameters and constants: the same
for all examples) or *private* (it may depend on the example). Where a derived value meets a
private one in an operation that `_uses` knows, and a gradient flows there, that is a use. Anywhere
else the parameters behind it become *opaque*: the only way to their gradients is automatic
differentiation.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from dpoptax._bookkeeping import rules
from dpoptax._bookkeeping import views as _views
from dpoptax._bookkeeping.activity import CONSTANT, Activity, carries_gradient
from dpoptax._bookkeeping.program import (
    Application,
    Block,
    Derived,
    Private,
    Program,
    Step,
    Use,
    Value,
)

_INLINE = {"jit", "pjit", "closed_call", "core_call"}
# What a parameter gets there is of the size of a part of the output at most, for each example.
_ELEMENTWISE = {"add", "sub", "mul", "div", "concatenate"}
_REMAT = {"checkpoint", "remat", "remat2"}
# The derivatives of these are what a user wrote: linear in the cotangent or not.
_CUSTOM = {
    "custom_jvp_call", "custom_lin", "custom_transpose_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "linear_call",
}  # fmt: skip


class _Reader:
    """Follows the values of a program into steps."""

    def __init__(self) -> None:
        self.scans = 0

    def read(self, jaxpr: Any, consts: list[Value], args: list[Value], loops: Any) -> Block:
        block = Block([v for v in args if isinstance(v, Private)])
        block.results = self.extend(block, jaxpr, [*consts, *args], loops)
        return block

    def extend(self, block: Block, jaxpr: Any, args: list[Value], loops: Any) -> list[Value]:
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def value(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return Derived(atom.aval, constant=atom.val)
            return names[atom]

        for eqn in jaxpr.eqns:
            operands = tuple(value(v) for v in eqn.invars)
            for var, out in zip(eqn.outvars, self.step(block, eqn, operands, loops), strict=True):
                names[var] = out
        return [value(v) for v in jaxpr.outvars]

    def step(self, block: Block, eqn: Any, operands: Any, loops: Any) -> list[Value]:
        name = eqn.primitive.name
        if name in _INLINE:
            closed = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            inner, consts = _open(closed)
            return self.extend(block, inner, [*map(_constant, consts), *operands], loops)
        if not eqn.effects and all(isinstance(v, Derived) for v in operands):
            return list(_derive(eqn, operands))
        touched = any(v.varies if isinstance(v, Derived) else v.touched for v in operands)
        outputs = tuple(Private(v.aval, touched) for v in eqn.outvars)
        if name == "scan":
            block.steps.append(self.scan(eqn, operands, outputs, loops))
        elif name in _REMAT:
            inner, consts = _open(eqn.params["jaxpr"])
            body = self.read(inner, [*map(_constant, consts)], list(operands), loops)
            block.steps.append(Step(eqn, operands, outputs, loops, body=body))
            return [
                inside if isinstance(inside, Derived) else out
                for inside, out in zip(body.results, outputs, strict=True)
            ]
        else:
            block.steps.append(Step(eqn, operands, outputs, loops))
        return list(outputs)

    def scan(self, eqn: Any, operands: Any, outputs: Any, loops: Any) -> Step:
        p = eqn.params
        scan, self.scans = self.scans, self.scans + 1
        n_consts, n_carry = p["num_consts"], p["num_carry"]
        inner, consts = _open(p["jaxpr"])
        args: list[Value] = []
        for i, (outer, var) in enumerate(zip(operands, inner.invars, strict=True)):
            if n_consts <= i < n_consts + n_carry:
                args.append(Private(var.aval))
            elif isinstance(outer, Private):
                args.append(Private(var.aval, outer.touched))
            elif i < n_consts:
                args.append(outer)
            else:
                scans = (*outer.scans, scan)
                args.append(
                    dataclasses.replace(
                        outer,
                        aval=var.aval,
                        scans=scans,
                        leaf=None,
                        constant=None,
                        source=None,
                        index=0,
                        alias=outer,
                    )  # fmt: skip
                )
        body = self.read(inner, [*map(_constant, consts)], args, (*loops, (scan, p["length"])))
        return Step(eqn, operands, outputs, loops, body=body, scan=scan)


class _Finder:
    """Finds the uses of parameters among steps, and what is opaque."""

    def __init__(self, parameters: tuple[Any, ...], active: Activity) -> None:
        self.parameters = parameters
        self.active = active
        self.opaque: dict[int, list[str]] = {}
        self.heavy: set[int] = set()
        self.uses: list[Use] = []

    def mark(self, values: Any, reason: str, reach: int = 0) -> None:
        """Notes that parameters meet data unseen, in an output of `reach` entries."""
        for value in values:
            if isinstance(value, Derived):
                for leaf in value.leaves:
                    reasons = self.opaque.setdefault(leaf, [])
                    if reason not in reasons:
                        reasons.append(reason)
                    if reason not in _ELEMENTWISE or self.parameters[leaf].size > reach:
                        self.heavy.add(leaf)

    def find(self, block: Block) -> None:
        """Gives each step of a block its use."""
        block.steps = [self.step(s) if s in self.active.steps else s for s in block.steps]

    def step(self, step: Step) -> Step:
        if step.body is None:
            return self.meet(step)
        if step.scan is not None:
            outputs, carried = self.active.scanned(step)
            flows = [*carried, *outputs[len(carried) :]]
            self.mark(itertools.compress(step.operands[step.carry], carried), "the carry of scan")
            self.mark(itertools.compress(step.body.results, flows), "the results of scan")
        self.find(step.body)
        return step

    def meet(self, step: Step) -> Step:
        eqn, operands = step.eqn, step.operands
        flowing = [i for i, v in enumerate(operands) if isinstance(v, Derived) and v.leaves]
        if not flowing:
            return step
        private = [isinstance(v, Private) for v in operands]
        found = rules.find_rule(eqn, private, [self.is_part(v) for v in operands])
        if found and flowing == [found[1]]:
            rule, parameter, data = found
            value = operands[parameter]
            assert isinstance(value, Derived)
            if not value.nonlinear:
                around = tuple((n, s in value.scans) for s, n in step.loops)
                read = operands[data]
                touched = rule.reads_data and isinstance(read, Private) and read.touched
                use = Use(
                    len(self.uses), rule, value, eqn.invars[data].aval, eqn.outvars[0].aval,
                    around, touched,
                )  # fmt: skip
                self.uses.append(use)
                return dataclasses.replace(step, use=use, data=data)
            self.mark([value], value.nonlinear)
            return step
        steps = math.prod(length for _, length in step.loops)
        reach = max(v.aval.size for v in step.outputs)
        self.mark(operands, eqn.primitive.name, steps * reach)
        return step

    def is_part(self, value: Value) -> bool:
        """Whether a value is some of the entries of one parameter."""
        if not isinstance(value, Derived) or value.view is None:
            return False
        return math.prod(value.view.shape) < self.parameters[value.view.leaf].size


def _derive(eqn: Any, operands: tuple[Derived, ...]) -> list[Derived]:
    leaves = frozenset().union(*(v.leaves for v in operands))
    varies = any(v.varies for v in operands)
    nonlinear = max((v.nonlinear for v in operands if v.leaves), default="") or _nonlinear(eqn)
    scans = tuple(sorted({s for v in operands for s in v.scans}))
    source = Application(eqn, operands, scans)
    views, tiles = _views_after(eqn, operands), _tiles(eqn, operands)
    outputs = []
    for i, (var, view) in enumerate(zip(eqn.outvars, views, strict=True)):
        flows = bool(leaves) and eqn.primitive.name not in CONSTANT and carries_gradient(var.aval)
        outputs.append(
            Derived(
                var.aval,
                leaves if flows else frozenset(),
                varies,
                nonlinear if flows else "",
                scans,
                view if flows else None,
                tiles if flows else None,
                source=source,
                index=i,
            )  # fmt: skip
        )
    return outputs


def _nonlinear(eqn: Any) -> str:
    """The name of an operation whose derivative need not be linear in the cotangent, else empty."""
    name = eqn.primitive.name
    if name in _CUSTOM:
        return name
    bits = eqn.params if name == "reduce_precision" else {}
    few = bits and (bits["exponent_bits"] < 5 or bits["mantissa_bits"] < 7)
    if few or any(rules.is_narrow(v.aval.dtype) for v in eqn.outvars):
        return f"{name} to few bits"
    inner = [e for jaxpr in _inside(eqn.params) for e in jaxpr.eqns]
    return next(filter(None, map(_nonlinear, inner)), "")


def _inside(params: Any) -> list[Any]:
    """The programs among the parameters of an operation."""
    is_jaxpr = lambda x: hasattr(x, "eqns")  # noqa: E731
    found = jax.tree.leaves(list(params.values()), is_leaf=is_jaxpr)
    return [_open(x)[0] for x in found if is_jaxpr(x)]


def _views_after(eqn: Any, operands: tuple[Derived, ...]) -> list[_views.View | None]:
    """The views that an operation's results are, None where they are none."""
    name = eqn.primitive.name
    unknown: list[_views.View | None] = [None] * len(eqn.outvars)
    moved = [v for v in operands if v.leaves]
    if len(moved) != 1 or moved[0].view is None:
        return unknown
    if moved[0] is not operands[0] and name != "mul":
        return unknown
    if not all(rules.is_real(v.aval.dtype) for v in eqn.outvars):
        return unknown
    view, lead = moved[0].view, len(moved[0].scans)
    if name == "split":
        return view.split(eqn.params["axis"] + lead, eqn.params["sizes"])
    if len(eqn.outvars) != 1:
        return unknown
    constants = [v.constant for v in operands if v is not moved[0]]
    return [_views.through(view, name, _behind(view.shape[:lead], name, eqn.params), constants)]


def _tiles(eqn: Any, operands: tuple[Derived, ...]) -> Any:
    """What `Derived.tiles` is after a concatenation of whole parameters."""
    views = [v.view for v in operands if v.view is not None]
    alike = len({v.scans for v in operands}) == 1
    if eqn.primitive.name != "concatenate" or len(views) < len(operands) or not alike:
        return None
    return eqn.params["dimension"] + len(operands[0].scans), tuple(views)


def _behind(steps: tuple[int, ...], name: str, params: Any) -> dict[str, Any]:
    """The parameters of an operation on one step, for all steps of the scans around at once."""
    lead, params = len(steps), dict(params)
    front = tuple(range(lead))
    if name == "reshape":
        params["new_sizes"] = (*steps, *params["new_sizes"])
    elif name == "transpose":
        params["permutation"] = (*front, *(i + lead for i in params["permutation"]))
    elif name == "squeeze":
        params["dimensions"] = tuple(i + lead for i in params["dimensions"])
    elif name == "broadcast_in_dim":
        params["shape"] = (*steps, *params["shape"])
        kept = (i + lead for i in params["broadcast_dimensions"])
        params["broadcast_dimensions"] = (*front, *kept)
    elif name == "slice":
        starts = params["start_indices"]
        params["strides"] = (*(1 for _ in steps), *(params["strides"] or (1 for _ in starts)))
        params["start_indices"] = (*(0 for _ in steps), *starts)
        params["limit_indices"] = (*steps, *params["limit_indices"])
    return params


def _open(jaxpr: Any) -> tuple[Any, list[Any]]:
    return (jaxpr.jaxpr, list(jaxpr.consts)) if hasattr(jaxpr, "consts") else (jaxpr, [])


def _constant(value: Any) -> Derived:
    return Derived(jax.typeof(value), constant=value)


def check_parameters(params: Any) -> None:
    """Raises a TypeError where parameters are anything but real floats of 16 bits or more."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jax.typeof(leaf).dtype
        if rules.is_real(dtype):
            continue
        remedy = "has no gradient: close loss_fn over it, and leave it out of the parameters"
        if jnp.issubdtype(dtype, jnp.complexfloating):
            remedy = "cannot be clipped: hold its real and its imaginary part as two parameters"
        elif rules.is_narrow(dtype):
            remedy = (
                "is too narrow for a gradient: hold it in bfloat16 or wider, cast it in loss_fn"
            )
        name = jax.tree_util.keystr(path) or "the parameter"
        raise TypeError(f"params: {name} of dtype {dtype} {remedy}")


def read_program(loss_fn: Any, params: Any, example: Any, key: Any, *, has_aux: bool) -> Program:
    """Traces `loss_fn(params, example[, key])` on shapes and reads it.

    The arguments are arrays or shape structs of one example; `key` is None where there is none.
    """
    check_parameters(params)
    extra = () if key is None else (key,)

    def flat(params: Any, example: Any, *key: Any) -> Any:
        out = loss_fn(params, example, *key)
        return out if has_aux else (out, None)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(params, example, *extra)
    if shapes[0].shape != ():
        raise TypeError(
            f"loss_fn must return a scalar for one example, but its value has shape "
            f"{shapes[0].shape}; reduce it, or set has_aux=True if it returns (loss, aux)"
        )
    leaves = jax.tree.leaves(params)
    count = len(leaves)
    args: list[Value] = []
    for i, var in enumerate(closed.jaxpr.invars):
        if i < count:
            view = _views.View.whole(i, tuple(var.aval.shape))
            flows = frozenset({i} if var.aval.size else ())
            args.append(Derived(var.aval, flows, True, view=view, leaf=i))
        else:
            args.append(Private(var.aval, touched=False))
    parameters = tuple(var.aval for var in closed.jaxpr.invars[:count])
    block = _Reader().read(closed.jaxpr, [_constant(c) for c in closed.consts], args, ())
    active = Activity()
    active.flow_through(block, [True] + [False] * (len(block.results) - 1))
    finder = _Finder(parameters, active)
    finder.find(block)
    finder.mark(block.results[:1], "the loss itself")
    return Program(
        block,
        parameters,
        tuple(finder.uses),
        {leaf: tuple(reasons) for leaf, reasons in finder.opaque.items()},
        frozenset(set(finder.opaque) - finder.heavy),
        jax.tree.structure(shapes),
    )
