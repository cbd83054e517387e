"""Describes derived values by their parameters and views."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from dpoptax._gradients.ghost_clipping.trace.program import (
    Constant,
    DerivedValue,
    Operation,
    Result,
)
from dpoptax._gradients.ghost_clipping.trace.views import View, view_of_result
from dpoptax._support.jaxprs import (
    CUSTOM_DERIVATIVE_CALLS,
    ZERO_DERIVATIVE_PRIMITIVES,
    carries_gradient,
    open_jaxpr,
    subprograms,
    type_of,
)
from dpoptax._support.tree import is_narrow, is_real

Operands: TypeAlias = tuple[DerivedValue, ...]

_MOST_INTEGERS = 1 << 20  # computed while the loss is traced
# Operations with the same results everywhere. Others may read a mesh, a platform or a host.
_INTEGER_OPERATIONS = {
    "add", "broadcast_in_dim", "clamp", "concatenate", "convert_element_type", "eq", "expand_dims",
    "ge", "gt", "iota", "le", "lt", "max", "min", "mul", "neg", "rem", "reshape", "rev", "select_n",
    "slice", "squeeze", "sub", "transpose",
}  # fmt: skip


def derive_values(eqn: JaxprEqn, operands: Operands) -> list[DerivedValue]:
    """Returns the results of an operation on derived values."""
    leaves = frozenset().union(*(v.leaves for v in operands))
    varies = any(v.varies for v in operands)
    nonlinear = max((v.nonlinear for v in operands if v.leaves), default="") or _nonlinear(eqn)
    scans = tuple(sorted({s for v in operands for s in v.scans}))
    operation = Operation(eqn, operands, scans)
    views = _result_views(eqn, operands)
    tiles = _find_tiles(eqn, operands) if eqn.primitive.name == "concatenate" else None
    outputs = []
    for i, (var, view) in enumerate(zip(eqn.outvars, views, strict=True)):
        aval = type_of(var)
        flows = (
            bool(leaves)
            and eqn.primitive.name not in ZERO_DERIVATIVE_PRIMITIVES
            and carries_gradient(aval)
        )
        outputs.append(
            DerivedValue(
                aval,
                Result(operation, i),
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


def _result_views(eqn: JaxprEqn, operands: Operands) -> list[View | None]:
    """Returns the view of a parameter for each result, or `None` if it is not one."""
    name = eqn.primitive.name
    unknown: list[View | None] = [None] * len(eqn.outvars)
    moved = [v for v in operands if v.leaves]
    if len(moved) != 1 or moved[0].view is None:
        return unknown
    # Only `mul` may have the moved value as its second operand.
    if moved[0] is not operands[0] and name != "mul":
        return unknown
    if not all(is_real(type_of(v).dtype) for v in eqn.outvars):
        return unknown
    view, lead = moved[0].view, len(moved[0].scans)
    if name == "split":
        return view.split(eqn.params["axis"] + lead, eqn.params["sizes"])
    if len(eqn.outvars) != 1:
        return unknown
    if name == "gather":
        known = None if lead else _known_integers(operands[1])
        return unknown if known is None else [view.gather(eqn.params, known)]
    others = [v.origin for v in operands if v is not moved[0]]
    constants = [origin.value if isinstance(origin, Constant) else None for origin in others]
    return [
        view_of_result(view, name, _add_scan_axes(view.shape[:lead], name, eqn.params), constants)
    ]


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
    eqn = origin.operation.eqn
    operands = [_known_integers(v) for v in origin.operation.operands]
    if eqn.primitive.name not in _INTEGER_OPERATIONS or any(v is None for v in operands):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*operands, **eqn.params))


def _find_tiles(eqn: JaxprEqn, operands: Operands) -> tuple[int, tuple[View, ...]] | None:
    """Returns `DerivedValue.tiles` of a concatenation; `None` if it is not of whole parameters."""
    views = [v.view for v in operands if v.view is not None]
    alike = len({v.scans for v in operands}) == 1
    if len(views) < len(operands) or not alike:
        return None
    return eqn.params["dimension"] + len(operands[0].scans), tuple(views)


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


def open_program(program: Jaxpr | ClosedJaxpr) -> tuple[Jaxpr, list[DerivedValue]]:
    """Returns an inner program, and its constants as derived values."""
    consts = program.consts if isinstance(program, ClosedJaxpr) else ()
    return open_jaxpr(program), [constant_value(value) for value in consts]


def constant_value(value: Any) -> DerivedValue:
    """Returns a constant of a trace as a derived value."""
    return DerivedValue(jax.typeof(value), Constant(value))
