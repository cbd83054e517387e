"""Finds which entries of parameters a derived value holds, and how it was computed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from dpoptax._losses.traced_program import Constant, DerivedValue, Parameter, Result, ScanSlices
from dpoptax._losses.views import View, view_of_result
from dpoptax._support.jaxprs import (
    CUSTOM_DERIVATIVE_CALLS,
    INDEX_ARITHMETIC,
    bind,
    subprograms,
    type_of,
)
from dpoptax._support.tree import is_narrow, is_real

_MOST_INTEGERS = 1 << 20  # computed while the loss is traced


def find_view(value: DerivedValue) -> View | None:
    """Returns the entries of a parameter that a value holds.

    The result is `None` if the value does more than move or scale entries of one parameter. The
    axes of the scans in `value.scans` come first.
    """
    # Walk back from the value to its parameter, then apply the steps on the way from there.
    moves: list[Result] = []
    while value.leaves and not isinstance(value.origin, Parameter):
        match value.origin:
            case ScanSlices(whole):
                # The slices of all steps together are the whole stack, with the steps as leading
                # axis.
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
    # Both w · c and c · w scale w, but c / w does not.
    if moved is not operands[0] and name != "mul":
        return None
    if not all(is_real(type_of(v).dtype) for v in eqn.outvars):
        return None
    # The operation moves entries within each step of the enclosing scans.
    steps = view.axes[: len(moved.scans)]
    in_step = dataclasses.replace(view, axes=view.axes[len(steps) :])
    after: View | None = None
    if name == "split":
        after = in_step.split(eqn.params["axis"], eqn.params["sizes"])[move.index]
    elif name == "gather":
        known = _known_integers(operands[1])
        after = None if known is None else in_step.gather(eqn.params, known)
    elif len(eqn.outvars) == 1:
        others = [v.origin for v in operands if v is not moved]
        constants = [origin.value if isinstance(origin, Constant) else None for origin in others]
        after = view_of_result(in_step, name, eqn.params, constants)
    return None if after is None else dataclasses.replace(after, axes=steps + after.axes)


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
    # With other scans, the axes of an operand would be counted differently.
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
    # Any of the names will do. The largest does not depend on the order of the set.
    return max(found, default="")


def _nonlinear(eqn: JaxprEqn) -> str:
    """Names an operation whose derivative may not be linear; otherwise returns ""."""
    name = eqn.primitive.name
    if name in CUSTOM_DERIVATIVE_CALLS:
        return name
    bits = eqn.params if name == "reduce_precision" else {}
    # float16 has 5 exponent bits and bfloat16 7 mantissa bits. Rounding to them counts as linear.
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
    operands: list[Any] = [_known_integers(v) for v in origin.operands]
    if eqn.primitive.name not in INDEX_ARITHMETIC or any(v is None for v in operands):
        return None
    # A trace around this would record the operation instead of its result.
    with jax.ensure_compile_time_eval():
        return np.asarray(bind(eqn, operands)[origin.index])
