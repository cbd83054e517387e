"""Finds which entries of parameters a derived value holds, and how it was computed."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from dpoptax._losses.program import (
    Constant,
    DerivedValue,
    Parameter,
    Result,
    ScanSlices,
)
from dpoptax._losses.views import View, view_of_result
from dpoptax._support.jaxprs import CUSTOM_DERIVATIVE_CALLS, subprograms, type_of
from dpoptax._support.tree import is_narrow, is_real

_MOST_INTEGERS = 1 << 20  # computed while the loss is traced
# Operations with the same results everywhere. Others may read a mesh, a platform or a host.
_INTEGER_OPERATIONS = {
    "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "eq", "expand_dims",
    "ge", "gt", "iota", "le", "lt", "max", "min", "mul", "neg", "rem", "reshape", "rev", "select_n",
    "slice", "squeeze", "sub", "transpose",
}  # fmt: skip


def find_view(value: DerivedValue) -> View | None:
    """Returns the entries of a parameter that a value holds.

    The result is `None` if the value does more than move or scale entries of one parameter. The
    axes of the scans in `value.scans` come first.
    """
    moves: list[Result] = []
    while value.leaves and not isinstance(value.origin, Parameter):
        match value.origin:
            case ScanSlices(whole):
                value = whole
            case Result() as move:
                moved = [v for v in move.operands if v.leaves]
                if len(moved) != 1:
                    return None
                moves.append(move)
                value = moved[0]
            case _:
                return None
    if not isinstance(value.origin, Parameter):
        return None
    view: View | None = View.identity(value.origin.leaf, tuple(value.aval.shape))
    for move in reversed(moves):
        view = None if view is None else _view_of_move(move, view)
    return view


def _view_of_move(move: Result, view: View) -> View | None:
    """Returns the view after a step, from the view of its only operand with a gradient."""
    eqn, operands = move.step.eqn, move.operands
    name = eqn.primitive.name
    (moved,) = (v for v in operands if v.leaves)
    # Only `mul` may have the moved value as its second operand.
    if moved is not operands[0] and name != "mul":
        return None
    if not all(is_real(type_of(v).dtype) for v in eqn.outvars):
        return None
    lead = len(moved.scans)
    if name == "split":
        return view.split(eqn.params["axis"] + lead, eqn.params["sizes"])[move.index]
    if len(eqn.outvars) != 1:
        return None
    if name == "gather":
        known = None if lead else _known_integers(operands[1])
        return None if known is None else view.gather(eqn.params, known)
    others = [v.origin for v in operands if v is not moved]
    constants = [origin.value if isinstance(origin, Constant) else None for origin in others]
    params = _add_scan_axes(view.shape[:lead], name, eqn.params)
    return view_of_result(view, name, params, constants)


def find_tiles(value: DerivedValue) -> tuple[int, tuple[View, ...]] | None:
    """Returns an axis, counted with those of scans, and the views concatenated along it.

    The result is `None` if the value is not a concatenation of parameters.
    """
    while isinstance(value.origin, ScanSlices):
        value = value.origin.whole
    origin = value.origin
    if not isinstance(origin, Result) or origin.step.eqn.primitive.name != "concatenate":
        return None
    operands = origin.operands
    views = [view for v in operands if (view := find_view(v)) is not None]
    alike = len({v.scans for v in operands}) == 1
    if len(views) < len(operands) or not alike:
        return None
    return origin.step.eqn.params["dimension"] + len(operands[0].scans), tuple(views)


def find_nonlinear(value: DerivedValue) -> str:
    """Names an operation behind a value whose derivative is not linear in the cotangent.

    Examples are `custom_vjp` and rounding to few bits. Uses of the value cannot be pulled back
    separately. Without such an operation, the result is empty.
    """
    seen, stack, found = {value}, [value], set()
    while stack:
        origin = stack.pop().origin
        if isinstance(origin, Result):
            found.add(_nonlinear(origin.step.eqn))
        before = [origin.whole] if isinstance(origin, ScanSlices) else []
        before += origin.operands if isinstance(origin, Result) else ()
        new = [v for v in before if v.leaves and v not in seen]
        seen.update(new)
        stack.extend(new)
    return max(found, default="")


def _nonlinear(eqn: JaxprEqn) -> str:
    """Names an operation whose derivative may not be linear; otherwise returns ""."""
    name = eqn.primitive.name
    if name in CUSTOM_DERIVATIVE_CALLS:
        return name
    bits = eqn.params if name == "reduce_precision" else {}
    few = bits and (bits["exponent_bits"] < 5 or bits["mantissa_bits"] < 7)
    if few or any(is_narrow(type_of(v).dtype) for v in eqn.outvars):
        return f"{name} to few bits"
    inner = [e for jaxpr in subprograms(eqn.params) for e in jaxpr.eqns]
    return next(filter(None, map(_nonlinear, inner)), "")


def _known_integers(value: DerivedValue) -> np.ndarray | None:
    """Returns constant integers, such as those of `jnp.arange`, or `None`."""
    origin = value.origin
    whole = jnp.issubdtype(value.aval.dtype, jnp.integer) or value.aval.dtype == bool
    if not whole or value.aval.size > _MOST_INTEGERS or value.scans:
        return None
    if isinstance(origin, Constant):
        return np.asarray(origin.value)
    if not isinstance(origin, Result) or value.varies:
        return None
    eqn = origin.step.eqn
    operands = [_known_integers(v) for v in origin.operands]
    if eqn.primitive.name not in _INTEGER_OPERATIONS or any(v is None for v in operands):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*operands, **eqn.params))


def _add_scan_axes(steps: tuple[int, ...], name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of an operation for all steps of the enclosing scans."""
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
