"""What an operation makes of derived values: which parameters flow on, and as which views."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from dpoptax._ghost_clipping.trace import rules
from dpoptax._ghost_clipping.trace.activity import CONSTANT, carries_gradient
from dpoptax._ghost_clipping.trace.program import Application, Constant, Derived, Result, type_of
from dpoptax._ghost_clipping.trace.views import View, through
from dpoptax._tree import PyTree

# The derivatives of these are what a user wrote: linear in the cotangent or not.
CUSTOM = {
    "custom_jvp_call", "custom_lin", "custom_transpose_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "linear_call",
}  # fmt: skip


def derive(eqn: JaxprEqn, operands: tuple[Derived, ...]) -> list[Derived]:
    """The results of an operation on derived values."""
    leaves = frozenset().union(*(v.leaves for v in operands))
    varies = any(v.varies for v in operands)
    nonlinear = max((v.nonlinear for v in operands if v.leaves), default="") or _nonlinear(eqn)
    scans = tuple(sorted({s for v in operands for s in v.scans}))
    application = Application(eqn, operands, scans)
    views, tiles = _views_after(eqn, operands), _tiles(eqn, operands)
    outputs = []
    for i, (var, view) in enumerate(zip(eqn.outvars, views, strict=True)):
        aval = type_of(var)
        flows = bool(leaves) and eqn.primitive.name not in CONSTANT and carries_gradient(aval)
        outputs.append(
            Derived(
                aval,
                Result(application, i),
                leaves if flows else frozenset(),
                varies,
                nonlinear if flows else "",
                scans,
                view if flows else None,
                tiles if flows else None,
            )  # fmt: skip
        )
    return outputs


def _nonlinear(eqn: JaxprEqn) -> str:
    """The name of an operation whose derivative need not be linear in the cotangent, else empty."""
    name = eqn.primitive.name
    if name in CUSTOM:
        return name
    bits = eqn.params if name == "reduce_precision" else {}
    few = bits and (bits["exponent_bits"] < 5 or bits["mantissa_bits"] < 7)
    if few or any(rules.is_narrow(type_of(v).dtype) for v in eqn.outvars):
        return f"{name} to few bits"
    inner = [e for jaxpr in inside(eqn.params) for e in jaxpr.eqns]
    return next(filter(None, map(_nonlinear, inner)), "")


def bind(eqn: JaxprEqn, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of an operation."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        out = eqn.primitive.bind(*operands, **params)
    return tuple(out) if eqn.primitive.multiple_results else (out,)


def inside(params: Mapping[str, PyTree]) -> list[Jaxpr]:
    """The programs among the parameters of an operation."""

    def is_program(x: object) -> TypeGuard[Jaxpr | ClosedJaxpr]:
        return hasattr(x, "eqns")

    found = jax.tree.leaves(list(params.values()), is_leaf=is_program)
    return [_bare(x) for x in found if is_program(x)]


def _views_after(eqn: JaxprEqn, operands: tuple[Derived, ...]) -> list[View | None]:
    """The views that an operation's results are, None where they are none."""
    name = eqn.primitive.name
    unknown: list[View | None] = [None] * len(eqn.outvars)
    moved = [v for v in operands if v.leaves]
    if len(moved) != 1 or moved[0].view is None:
        return unknown
    if moved[0] is not operands[0] and name != "mul":
        return unknown
    if not all(rules.is_real(type_of(v).dtype) for v in eqn.outvars):
        return unknown
    view, lead = moved[0].view, len(moved[0].scans)
    if name == "split":
        return view.split(eqn.params["axis"] + lead, eqn.params["sizes"])
    if len(eqn.outvars) != 1:
        return unknown
    others = [v.origin for v in operands if v is not moved[0]]
    constants = [origin.value if isinstance(origin, Constant) else None for origin in others]
    return [through(view, name, _behind(view.shape[:lead], name, eqn.params), constants)]


def _tiles(eqn: JaxprEqn, operands: tuple[Derived, ...]) -> tuple[int, tuple[View, ...]] | None:
    """What `Derived.tiles` is after a concatenation of whole parameters."""
    views = [v.view for v in operands if v.view is not None]
    alike = len({v.scans for v in operands}) == 1
    if eqn.primitive.name != "concatenate" or len(views) < len(operands) or not alike:
        return None
    return eqn.params["dimension"] + len(operands[0].scans), tuple(views)


def _behind(steps: tuple[int, ...], name: str, params: Mapping[str, Any]) -> dict[str, Any]:
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


def open_program(program: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, list[Derived]]:
    """A program within a program, and the constants that it is closed over."""
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    return _bare(program), [known(value) for value in consts]


def _bare(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def known(value: Any) -> Derived:
    """A constant of a trace."""
    return Derived(jax.typeof(value), Constant(value))
