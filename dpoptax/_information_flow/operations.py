"""What operations make of the rows of a batch.

Most make each row of what they return of that row of what they were given: then a row is still of
one example, and clipping it bounds what that one does. A mean over the batch, a row added to its
neighbour, do not. An operation that is not known here counts as one that joins rows.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from dpoptax._ghost_clipping.trace.example_separation import (
    has_keys_by_place,
    named_axes,
    runs_to_the_last,
)
from dpoptax._information_flow.example_axes import Along, Rows


def after(
    eqn: JaxprEqn, given: Mapping[int, Rows | None], numbers: Sequence[Hashable | None]
) -> Rows | None:
    """The rows of an operation's results; None where it joins them.

    Args:
      eqn: the operation, which has no program of the user's in it.
      given: those of its operands with private data, by their places.
      numbers: of each operand what is equal for equal values, None where nothing is.
    """
    found = {rows and _after_one(eqn, i, rows, numbers) for i, rows in given.items()}
    alike = found.pop() if len(found) == 1 else None
    parts = [rows for rows in given.values() if rows]
    if alike is None and eqn.primitive.name == "concatenate" and len(parts) == len(eqn.invars):
        return _put_together(parts, eqn.params["dimension"])
    return alike


def _after_one(
    eqn: JaxprEqn, operand: int, rows: Rows, numbers: Sequence[Hashable | None]
) -> Rows | None:
    """As far as one operand decides."""
    name, shape = eqn.primitive.name, _shape(eqn.invars[operand])
    if not rows.digits:
        return rows
    if _communicates(eqn) or "callback" in name:
        return None
    if not rows.along:
        return rows
    if runs_to_the_last(name) or has_keys_by_place(eqn):
        return None
    if any(digit.axis >= len(shape) for digit in rows.along):
        return None
    chosen = _chosen(eqn, operand, rows, numbers)
    if chosen is not None:
        return chosen
    if name == "reshape":
        order = list(eqn.params["dimensions"] or range(len(shape)))
        given = [dataclasses.replace(digit, axis=order.index(digit.axis)) for digit in rows.along]
        along = _reshaped(given, [shape[axis] for axis in order], _shape(eqn.outvars[0]))
        return None if along is None else rows.laid_out(along)
    if name not in _RULES:
        return None
    moved = [_RULES[name](eqn, operand, digit) for digit in rows.along]
    found = [digit for digit in moved if digit is not None]
    if len(found) < len(moved) or not _fits(eqn, shape, rows.along, found):
        return None
    return rows.moved(found)


def _put_together(parts: Sequence[Rows], axis: int) -> Rows | None:
    """The rows of slices one behind the other; None where they are not."""
    slices = []
    for part in parts:
        match part.drawn:
            case (*of, ("slice", length, start, end, None | 1)) if part.along == (Along(axis),):
                slices.append(((part.digits, of, length), start, end))
            case _:
                return None
    these, first, last = slices[0]
    for each, start, end in slices[1:]:
        if (each, start) != (these, last):
            return None
        last = end
    digits, of, length = these
    whole = (first, last) == (0, length)
    drawn = of if whole else (*of, ("slice", length, first, last, None))
    return Rows(digits, tuple(drawn))


def _shape(atom: Var | Literal) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _communicates(eqn: JaxprEqn) -> bool:
    """Whether devices of a mesh exchange values."""
    return bool(named_axes(eqn.effects)) or "axis_name" in eqn.params


def _fits(
    eqn: JaxprEqn, shape: Sequence[int], before: Sequence[Along], along: Sequence[Along]
) -> bool:
    """Whether all results have room for as many examples: rules are for the usual case."""
    return all(
        new.axis < len(_shape(out)) and _shape(out)[new.axis] * old.run == shape[old.axis] * new.run
        for out in eqn.outvars
        for old, new in zip(before, along, strict=True)
    )


def _chosen(
    eqn: JaxprEqn, operand: int, rows: Rows, numbers: Sequence[Hashable | None]
) -> Rows | None:
    """Where public indices choose among the rows, or set them among public ones; else None."""
    name, params, along = eqn.primitive.name, eqn.params, list(rows.along)
    if len(along) > 1 or along[0].run > 1 or (operand and name != "concatenate"):
        return None
    (axis,) = (digit.axis for digit in rows.along)
    length = _shape(eqn.invars[operand])[axis]
    by: tuple[Hashable, ...] = ()
    if name == "slice" and not _whole(eqn, axis):
        strides = params["strides"]
        ends = params["start_indices"][axis], params["limit_indices"][axis]
        by = (*ends, None if strides is None else strides[axis])
    elif name == "dynamic_slice" and params["slice_sizes"][axis] != length:
        number = numbers[1 + axis]
        by = () if number is None else (number, params["slice_sizes"][axis])
    elif name == "gather" and axis in (numbering := params["dimension_numbers"]).start_index_map:
        whole = axis not in numbering.collapsed_slice_dims
        if not whole and numbers[1] is not None:
            by = numbers[1], numbering.start_index_map.index(axis)
            along = [Along(out) for out in _batch_axes(eqn)]
    elif name == "pad":
        by = params["padding_config"][axis]
    elif name == "concatenate" and params["dimension"] == axis:
        before = sum(_shape(each)[axis] for each in eqn.invars[:operand])
        by = before, _shape(eqn.outvars[0])[axis] - before - length, 0
        name = "pad"
    by = () if (name, by) == ("pad", (0, 0, 0)) else by
    laid_out = rows.laid_out(along)
    if not by or laid_out is None:
        return None
    return dataclasses.replace(laid_out, drawn=(*rows.drawn, (name, length, *by)))


def _reshaped(along: Sequence[Along], old: Sequence[int], new: Sequence[int]) -> list[Along] | None:
    """The axes over which a reshape lays the examples, which axes next to each other count."""
    first = along[0].axis
    if [digit.axis for digit in along] != list(range(first, first + len(along))):
        return None
    if 0 in old or any(digit.run > 1 for digit in along[:-1]):
        return None
    count = math.prod(old[digit.axis] // digit.run for digit in along)
    outside, found = math.prod(old[:first]), []
    for axis, size in enumerate(new):
        if outside > 1 or (outside == 1 and size == 1 and count > 1):
            if outside % size:
                return None
            outside //= size
            continue
        if count % size and size % count:
            return None
        found.append(Along(axis, max(1, size // count)))
        count = max(1, count // size)
        if count == 1:
            return found
    return None


Rule = Callable[[JaxprEqn, int, Along], Along | None]


def _same(eqn: JaxprEqn, operand: int, digit: Along) -> Along:
    """Each entry of the results is made of the entries at the same place."""
    return digit


def _but(name: str) -> Rule:
    """As `_same`, but for the axes that a parameter names."""

    def rule(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
        axes = eqn.params[name]
        return None if digit.axis in (axes if isinstance(axes, tuple) else (axes,)) else digit

    return rule


def _without(name: str) -> Rule:
    """The axes that a parameter names are reduced, or of size 1 and dropped."""

    def rule(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
        axes = eqn.params[name]
        if digit.axis in axes:
            return None
        return dataclasses.replace(digit, axis=digit.axis - sum(a < digit.axis for a in axes))

    return rule


def _leading(behind: int) -> Rule:
    """Axes before the last ones are of a batch."""

    def rule(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
        return digit if digit.axis < len(_shape(eqn.invars[operand])) - behind else None

    return rule


def _transpose(eqn: JaxprEqn, operand: int, digit: Along) -> Along:
    return dataclasses.replace(digit, axis=eqn.params["permutation"].index(digit.axis))


def _broadcast(eqn: JaxprEqn, operand: int, digit: Along) -> Along:
    return dataclasses.replace(digit, axis=eqn.params["broadcast_dimensions"][digit.axis])


def _pad(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    return digit if eqn.params["padding_config"][digit.axis] == (0, 0, 0) else None


def _stack(eqn: JaxprEqn, operand: int, digit: Along) -> Along:
    return dataclasses.replace(digit, axis=digit.axis + (digit.axis >= eqn.params["axis"]))


def _unstack(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    axis = eqn.params["axis"]
    if digit.axis == axis:
        return None
    return dataclasses.replace(digit, axis=digit.axis - (digit.axis > axis))


def _tile(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    return digit if eqn.params["reps"][digit.axis] == 1 else None


def _whole(eqn: JaxprEqn, axis: int) -> bool:
    """Whether a slice has the same size along an axis: it is all of it."""
    return bool(_shape(eqn.outvars[0])[axis] == _shape(eqn.invars[0])[axis])


def _slice(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    return digit if _whole(eqn, digit.axis) else None


def _top_k(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    ndim = len(_shape(eqn.invars[0]))
    return digit if digit.axis != eqn.params.get("axis", -1) % ndim else None


def _fft(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    return _leading(len(eqn.params["fft_lengths"]))(eqn, operand, digit)


def _window(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    """A window of one entry, which moves by one."""
    params, axis = eqn.params, digit.axis
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = all(params[name][axis] == 1 for name in ones if name in params)
    return digit if alone and tuple(params["padding"][axis]) == (0, 0) else None


def _dot(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    contracted, batch = (axes[operand] for axes in eqn.params["dimension_numbers"])
    if digit.axis in contracted:
        return None
    if digit.axis in batch:
        return dataclasses.replace(digit, axis=batch.index(digit.axis))
    free = [a for a in range(len(_shape(eqn.invars[operand]))) if a not in (*contracted, *batch)]
    axis = len(batch) + free.index(digit.axis)
    if operand == 1:
        axis += len(_shape(eqn.invars[0])) - len(contracted) - len(batch)
    return dataclasses.replace(digit, axis=axis)


def _conv(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    """Images side by side; or each with kernels of its own, which are then groups of channels.

    Where XLA has no groups it multiplies by zero what is of others, which of infinities are no
    zeros: groups of a batch, and on TPUs, as is to be feared, of channels.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    channels, groups = numbers.out_spec[1], params["feature_group_count"]
    if params["batch_group_count"] > 1 or (groups > 1 and jax.default_backend() == "tpu"):
        return None
    if operand == 1:
        return Along(channels, digit.run) if digit.axis == numbers.rhs_spec[0] else None
    if digit.axis == numbers.lhs_spec[0]:
        return dataclasses.replace(digit, axis=numbers.out_spec[0])
    if digit.axis == numbers.lhs_spec[1]:
        run, rest = divmod(digit.run, _shape(eqn.invars[0])[digit.axis] // groups)
        made = _shape(eqn.invars[1])[numbers.rhs_spec[0]] // groups
        return None if rest else Along(channels, run * made)
    return None


def _batch_axes(eqn: JaxprEqn) -> list[int]:
    """The axes of a gather's result that go over its indices."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    return [axis for axis in range(len(_shape(eqn.outvars[0]))) if axis not in offsets]


def _gather(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    numbers, batch = eqn.params["dimension_numbers"], _batch_axes(eqn)
    if operand == 1:
        if digit.axis == len(_shape(eqn.invars[1])) - 1:
            return None
        return dataclasses.replace(digit, axis=batch[digit.axis])
    if digit.axis in numbers.operand_batching_dims:
        place = numbers.operand_batching_dims.index(digit.axis)
        axis = batch[numbers.start_indices_batching_dims[place]]
        return dataclasses.replace(digit, axis=axis)
    if digit.axis in numbers.collapsed_slice_dims:
        return None
    aside = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(_shape(eqn.invars[0]))) if axis not in aside]
    # `_fits` compares the sizes: what is as long as the axis is all of it.
    return dataclasses.replace(digit, axis=numbers.offset_dims[kept.index(digit.axis)])


def _scatter(eqn: JaxprEqn, operand: int, digit: Along) -> Along | None:
    if operand == 0:
        return digit
    numbers = eqn.params["dimension_numbers"]
    aside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(_shape(eqn.invars[0]))) if axis not in aside]
    place = digit.axis  # among the axes that go over the indices
    if operand == 2:
        windows = numbers.update_window_dims
        if digit.axis in windows:
            return dataclasses.replace(digit, axis=kept[windows.index(digit.axis)])
        place -= sum(axis < digit.axis for axis in windows)
    if place not in numbers.scatter_indices_batching_dims:
        return None
    axis = numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(place)]
    return dataclasses.replace(digit, axis=axis)


_ENTRY_BY_ENTRY = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type cos cosh digamma
    div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi name ne
    neg nextafter not one_minus_square or polygamma population_count pow random_bits
    random_fold_in random_seed random_split random_unwrap random_wrap real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta
"""
_REDUCTIONS = "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
_WINDOWS = """
    reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
    select_and_scatter_add
"""
_CUMULATIVE = "cumlogsumexp cummax cummin cumprod cumsum split"
_SCATTERS = "scatter scatter-add scatter-max scatter-min scatter-mul"
_OF_MATRICES = "cholesky geqrf householder_product lu triangular_solve"
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ENTRY_BY_ENTRY.split(), _same),
    **dict.fromkeys([*_REDUCTIONS.split(), "argmax", "argmin"], _without("axes")),
    **dict.fromkeys(_CUMULATIVE.split(), _but("axis")),
    **dict.fromkeys(("concatenate", "sort"), _but("dimension")),
    **dict.fromkeys(_WINDOWS.split(), _window),
    **dict.fromkeys(_SCATTERS.split(), _scatter),
    **dict.fromkeys(_OF_MATRICES.split(), _leading(2)),
    "broadcast_in_dim": _broadcast,
    "conv_general_dilated": _conv,
    "dot_general": _dot,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _same,
    "fft": _fft,
    "gather": _gather,
    "pad": _pad,
    "reduce": _without("dimensions"),
    "rev": _but("dimensions"),
    "slice": _slice,
    "squeeze": _without("dimensions"),
    "stack": _stack,
    "tile": _tile,
    "top_k": _top_k,
    "transpose": _transpose,
    "unstack": _unstack,
}
