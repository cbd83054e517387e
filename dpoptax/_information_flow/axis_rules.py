"""Rules for the axes along which an operation's results have the examples.

Most operations compute each row of the result from the same row of the operands. Each row then
still belongs to one example, and a clip bounds that example's contribution. A mean over the batch,
or adding a row to its neighbor, combines rows. Operations that are not listed here count as
combining rows.

The number of an entry's example may be spread over several axes, like a number over its digits:
after a reshape of (60, 5) to (12, 5, 5), example n is at axis 0, entry n // 5, and axis 1, entry
n % 5. A rule says where an operation moves one of these axes, an `AxisDigit`, or `None` if the
operation combines examples.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from dpoptax._information_flow.example_axes import AxisDigit, ExampleAxes
from dpoptax._losses.example_separation import converges_jointly, has_positional_keys, named_axes


def result_axes(
    eqn: JaxprEqn, given: Mapping[int, ExampleAxes | None], numbers: Sequence[Hashable | None]
) -> ExampleAxes | None:
    """Returns the example axes of the results, or `None` if rows are combined.

    Args:
      eqn: the operation, which contains no program of the user's.
      given: the example axes of operands with private data, by position.
      numbers: for each operand, a value that is equal for equal operands, or `None`.
    """
    # If operands disagree, entry n of the result depends on an example of each, which is several.
    # Each operand says where it puts its examples; `None` if they are combined already.
    found = {rows and _axes_after_operand(eqn, i, rows, numbers) for i, rows in given.items()}
    alike = found.pop() if len(found) == 1 else None
    parts = [rows for rows in given.values() if rows]
    if alike is None and eqn.primitive.name == "concatenate" and len(parts) == len(eqn.invars):
        return _concatenate_slices(parts, eqn.params["dimension"])
    return alike


def _axes_after_operand(
    eqn: JaxprEqn, operand: int, rows: ExampleAxes, numbers: Sequence[Hashable | None]
) -> ExampleAxes | None:
    """Returns the example axes of the results that one operand determines."""
    name, shape = eqn.primitive.name, _shape(eqn.invars[operand])
    # Between the marks of a clip, its own code adds examples, and bounds the part of each.
    if not rows.digits:
        return rows
    # Devices of a mesh, or a host function, may combine all values.
    if named_axes(eqn.effects) or "axis_name" in eqn.params or "callback" in name:
        return None
    # Each turn or device has one example, so nothing within it can combine examples.
    if not rows.axes:
        return rows
    if converges_jointly(name) or has_positional_keys(eqn):
        return None
    if any(digit.axis >= len(shape) for digit in rows.axes):
        return None
    chosen = _select_rows(eqn, operand, rows, numbers)
    if chosen is not None:
        return chosen
    if name == "reshape":
        order = list(eqn.params["dimensions"] or range(len(shape)))
        given = [digit.move(order.index(digit.axis)) for digit in rows.axes]
        along = _reshape_digits(given, [shape[axis] for axis in order], _shape(eqn.outvars[0]))
        return None if along is None else rows.placed(along)
    if name not in _AXIS_RULES:
        return None
    moved = [_AXIS_RULES[name](eqn, operand, digit) for digit in rows.axes]
    found = [digit for digit in moved if digit is not None]
    if len(found) < len(moved) or not _has_room(eqn, shape, rows.axes, found):
        return None
    # Turns and devices stay at their places among the digits.
    return rows.permuted(found)


def _concatenate_slices(parts: Sequence[ExampleAxes], axis: int) -> ExampleAxes | None:
    """Returns the example axes of consecutive slices, or `None` for other parts."""
    slices = []
    for part in parts:
        match part.drawn:
            case (*of, ("slice", length, start, end, None | 1)) if part.axes == (AxisDigit(axis),):
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
    return ExampleAxes(digits, tuple(drawn))


def _shape(atom: Var | Literal) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def _has_room(
    eqn: JaxprEqn, shape: Sequence[int], before: Sequence[AxisDigit], along: Sequence[AxisDigit]
) -> bool:
    """Returns whether all results have as many examples as the operand.

    The rules cover only the usual case.
    """
    return all(
        # An axis has size / run examples: new size / new run must be old size / old run.
        new.axis < len(_shape(out)) and _shape(out)[new.axis] * old.run == shape[old.axis] * new.run
        for out in eqn.outvars
        for old, new in zip(before, along, strict=True)
    )


def _select_rows(
    eqn: JaxprEqn, operand: int, rows: ExampleAxes, numbers: Sequence[Hashable | None]
) -> ExampleAxes | None:
    """Returns the axes if public indices select rows, or place them among public ones."""
    name, params, along = eqn.primitive.name, eqn.params, list(rows.axes)
    # Other operands of a selection are indices. Those of a concatenation are all arrays of rows.
    if len(along) > 1 or along[0].run > 1 or (operand and name != "concatenate"):
        return None
    (axis,) = (digit.axis for digit in rows.axes)
    length = _shape(eqn.invars[operand])[axis]
    # `by` identifies the selection: with an equal one, another array has the same examples in the
    # same rows.
    by: tuple[Hashable, ...] = ()
    if name == "slice" and not _is_whole_slice(eqn, axis):
        strides = params["strides"]
        ends = params["start_indices"][axis], params["limit_indices"][axis]
        by = (*ends, None if strides is None else strides[axis])
    elif name == "dynamic_slice" and params["slice_sizes"][axis] != length:
        number = numbers[1 + axis]
        # An unknown start cannot be compared. `_keep_whole` then refuses the slice.
        by = () if number is None else (number, params["slice_sizes"][axis])
    elif name == "gather" and axis in (numbering := params["dimension_numbers"]).start_index_map:
        whole = axis not in numbering.collapsed_slice_dims
        if not whole and numbers[1] is not None:
            by = numbers[1], numbering.start_index_map.index(axis)
            # The result has one row for each index, along all axes of the indices.
            along = [AxisDigit(out) for out in _batch_axes(eqn)]
    elif name == "pad":
        by = params["padding_config"][axis]
    elif name == "concatenate" and params["dimension"] == axis:
        # Rows between other rows are at the places to which a padding would move them.
        before = sum(_shape(each)[axis] for each in eqn.invars[:operand])
        by = before, _shape(eqn.outvars[0])[axis] - before - length, 0
        name = "pad"
    # A padding by nothing keeps all rows as they are.
    by = () if (name, by) == ("pad", (0, 0, 0)) else by
    placed = rows.placed(along)
    if not by or placed is None:
        return None
    return dataclasses.replace(placed, drawn=(*rows.drawn, (name, length, *by)))


def _reshape_digits(
    along: Sequence[AxisDigit], old: Sequence[int], new: Sequence[int]
) -> list[AxisDigit] | None:
    """Returns the axes over which a reshape spreads the examples of adjacent axes."""
    # Rows of 6 examples, (6, 4), become (2, 3, 4) with digits on axes 0 and 1, or (24,) with runs
    # of 4 entries.
    first = along[0].axis
    if [digit.axis for digit in along] != list(range(first, first + len(along))):
        return None
    if 0 in old or any(digit.run > 1 for digit in along[:-1]):
        return None
    count = math.prod(old[digit.axis] // digit.run for digit in along)
    # New axes first have to account for the axes before the digits, then for the examples.
    outside, found = math.prod(old[:first]), []
    for axis, size in enumerate(new):
        if outside > 1 or (outside == 1 and size == 1 and count > 1):
            if outside % size:
                return None
            outside //= size
            continue
        if count % size and size % count:
            return None
        # A new axis either holds a leading part of the examples (`count // size` are left for the
        # next axes), or all that are left, each with a run of `size // count` entries.
        found.append(AxisDigit(axis, max(1, size // count)))
        count = max(1, count // size)
        if count == 1:
            return found
    return None


AxisRule = Callable[[JaxprEqn, int, AxisDigit], AxisDigit | None]


def _keep_axis(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit:
    """Keeps the axis: each entry depends on the entries at the same place."""
    return digit


def _keep_unless(eqn: JaxprEqn, operand: int, digit: AxisDigit, *, name: str) -> AxisDigit | None:
    """Keeps the axis unless a parameter of the operation names it."""
    axes = eqn.params[name]
    return None if digit.axis in (axes if isinstance(axes, tuple) else (axes,)) else digit


def _drop_axes(eqn: JaxprEqn, operand: int, digit: AxisDigit, *, name: str) -> AxisDigit | None:
    """Drops the axes that a parameter names, which are reduced or of size 1."""
    axes = eqn.params[name]
    axes = (axes,) if isinstance(axes, int) else axes
    if digit.axis in axes:
        return None
    return digit.move(digit.axis - sum(a < digit.axis for a in axes))


def _keep_batch(
    eqn: JaxprEqn, operand: int, digit: AxisDigit, *, behind: int = 2
) -> AxisDigit | None:
    """Keeps axes before the last ones, which are batch axes."""
    return digit if digit.axis < len(_shape(eqn.invars[operand])) - behind else None


def _is_whole_slice(eqn: JaxprEqn, axis: int) -> bool:
    """Returns whether a slice covers a whole axis."""
    return bool(_shape(eqn.outvars[0])[axis] == _shape(eqn.invars[0])[axis])


def _keep_whole(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit | None:
    """Keeps an axis that a slice covers as a whole."""
    return digit if _is_whole_slice(eqn, digit.axis) else None


def _window(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit | None:
    """Keeps an axis whose window has one entry and moves by one."""
    params, axis = eqn.params, digit.axis
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    alone = all(params[name][axis] == 1 for name in ones if name in params)
    return digit if alone and tuple(params["padding"][axis]) == (0, 0) else None


def _move_through_product(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit | None:
    """Maps a batch axis or a free axis of a matrix product; contracted axes combine examples."""
    contracted, batch = (axes[operand] for axes in eqn.params["dimension_numbers"])
    if digit.axis in contracted:
        return None
    if digit.axis in batch:
        return digit.move(batch.index(digit.axis))
    free = [a for a in range(len(_shape(eqn.invars[operand]))) if a not in (*contracted, *batch)]
    # Results have the batch axes first, then the free axes of the left and the right operand.
    axis = len(batch) + free.index(digit.axis)
    if operand == 1:
        axis += len(_shape(eqn.invars[0])) - len(contracted) - len(batch)
    return digit.move(axis)


def _conv(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit | None:
    """Maps the batch of images, or groups of channels, each with its own kernels.

    Without native groups, XLA multiplies the other groups by zero, which turns infinities into NaN.
    This applies to groups of a batch, and possibly to groups of channels on TPU.
    """
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    channels, groups = numbers.out_spec[1], params["feature_group_count"]
    # Groups of a batch come from `jax.vmap` of grouped convolutions and from their gradients:
    # https://github.com/jax-ml/jax/pull/2635
    if params["batch_group_count"] > 1 or (groups > 1 and jax.default_backend() == "tpu"):
        return None
    if operand == 1:
        return AxisDigit(channels, digit.run) if digit.axis == numbers.rhs_spec[0] else None
    if digit.axis == numbers.lhs_spec[0]:
        return digit.move(numbers.out_spec[0])
    if digit.axis == numbers.lhs_spec[1]:
        # Each example must have whole groups of channels. A group computes `made` channels.
        run, rest = divmod(digit.run, _shape(eqn.invars[0])[digit.axis] // groups)
        made = _shape(eqn.invars[1])[numbers.rhs_spec[0]] // groups
        return None if rest else AxisDigit(channels, run * made)
    return None


def _batch_axes(eqn: JaxprEqn) -> list[int]:
    """Returns the axes of a gather's result that run over its indices."""
    offsets = eqn.params["dimension_numbers"].offset_dims
    return [axis for axis in range(len(_shape(eqn.outvars[0]))) if axis not in offsets]


def _gather(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit | None:
    numbers, batch = eqn.params["dimension_numbers"], _batch_axes(eqn)
    if operand == 1:
        # The last axis of the indices holds the coordinates of one place.
        if digit.axis == len(_shape(eqn.invars[1])) - 1:
            return None
        return digit.move(batch[digit.axis])
    if digit.axis in numbers.operand_batching_dims:
        place = numbers.operand_batching_dims.index(digit.axis)
        axis = batch[numbers.start_indices_batching_dims[place]]
        return digit.move(axis)
    if digit.axis in numbers.collapsed_slice_dims:
        return None
    aside = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(_shape(eqn.invars[0]))) if axis not in aside]
    # `_has_room` compares the sizes: a slice as long as the axis covers all of it.
    return digit.move(numbers.offset_dims[kept.index(digit.axis)])


def _scatter(eqn: JaxprEqn, operand: int, digit: AxisDigit) -> AxisDigit | None:
    if operand == 0:
        return digit
    numbers = eqn.params["dimension_numbers"]
    aside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [axis for axis in range(len(_shape(eqn.invars[0]))) if axis not in aside]
    # The operands are the array, the indices and the updates.
    place = digit.axis  # among the axes that run over the indices
    if operand == 2:
        windows = numbers.update_window_dims
        if digit.axis in windows:
            return digit.move(kept[windows.index(digit.axis)])
        place -= sum(axis < digit.axis for axis in windows)
    # With batching axes, example n only writes into row n. Other indices may name any row.
    if place not in numbers.scatter_indices_batching_dims:
        return None
    axis = numbers.operand_batching_dims[numbers.scatter_indices_batching_dims.index(place)]
    return digit.move(axis)


_ENTRYWISE_PRIMITIVES = """
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
_ALONG_AXIS_PRIMITIVES = "cumlogsumexp cummax cummin cumprod cumsum split"
_SCATTERS = "scatter scatter-add scatter-max scatter-min scatter-mul"
_MATRIX_PRIMITIVES = "cholesky geqrf householder_product lu triangular_solve"
_AXIS_RULES: dict[str, AxisRule] = {
    **dict.fromkeys(_ENTRYWISE_PRIMITIVES.split(), _keep_axis),
    **dict.fromkeys(
        [*_REDUCTIONS.split(), "argmax", "argmin"], functools.partial(_drop_axes, name="axes")
    ),
    **dict.fromkeys(_ALONG_AXIS_PRIMITIVES.split(), functools.partial(_keep_unless, name="axis")),
    **dict.fromkeys(("concatenate", "sort"), functools.partial(_keep_unless, name="dimension")),
    **dict.fromkeys(_WINDOWS.split(), _window),
    **dict.fromkeys(_SCATTERS.split(), _scatter),
    **dict.fromkeys(_MATRIX_PRIMITIVES.split(), _keep_batch),
    "broadcast_in_dim": lambda eqn, _, digit: digit.move(
        eqn.params["broadcast_dimensions"][digit.axis]
    ),
    "conv_general_dilated": _conv,
    "dot_general": _move_through_product,
    "dynamic_slice": _keep_whole,
    "dynamic_update_slice": _keep_axis,
    "fft": lambda eqn, *of: _keep_batch(eqn, *of, behind=len(eqn.params["fft_lengths"])),
    "gather": _gather,
    "pad": lambda eqn, _, digit: (
        digit if eqn.params["padding_config"][digit.axis] == (0, 0, 0) else None
    ),
    "reduce": functools.partial(_drop_axes, name="dimensions"),
    "rev": functools.partial(_keep_unless, name="dimensions"),
    "slice": _keep_whole,
    "squeeze": functools.partial(_drop_axes, name="dimensions"),
    "stack": lambda eqn, _, digit: digit.move(digit.axis + (digit.axis >= eqn.params["axis"])),
    "tile": lambda eqn, _, digit: digit if eqn.params["reps"][digit.axis] == 1 else None,
    "top_k": lambda eqn, _, digit: (
        digit if digit.axis != eqn.params.get("axis", -1) % len(_shape(eqn.invars[0])) else None
    ),
    "transpose": lambda eqn, _, digit: digit.move(eqn.params["permutation"].index(digit.axis)),
    "unstack": functools.partial(_drop_axes, name="axis"),
}
