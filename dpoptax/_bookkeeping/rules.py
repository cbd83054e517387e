"""Where a parameter meets data: one rule for each operation whose gradient is a sum of products.

A rule brings a use to one normal form: the gradient of the parameter-side operand z of one
example is, after z is cut into (K, R, C) by `Layout`,

    G[k, r, c] = sum_t rows[k, t, r] * columns[k, t, c]

with `rows` taken from the data operand and `columns` from the cotangent of the output (T is the
number of positions: tokens, pixels, steps). For a table that is looked up, `rows` is one-hot and
held as integers (K, T).
"""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import AbstractValue, ShapedArray
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Layout:
    """How z is cut: reshape to `split`, then gather its axes into batch K, rows R, columns C."""

    split: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, int, int]:
        batch, rows, columns = (
            math.prod(self.split[i] for i in axes) for axes in (self.batch, self.rows, self.columns)
        )
        return batch, rows, columns

    def fold(self, gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """(K, R, C) back to the shape of z."""
        order = (*self.batch, *self.rows, *self.columns)
        cut = gradient.reshape([self.split[i] for i in order])
        return cut.transpose([order.index(i) for i in range(len(order))]).reshape(shape)

    def stacked(self, length: int) -> "Layout":
        """The layout of z with one more leading axis, which becomes batch."""
        moved = [tuple(i + 1 for i in a) for a in (self.batch, self.rows, self.columns)]
        return Layout((length, *self.split), (0, *moved[0]), moved[1], moved[2])


class Rule:
    """What a use needs; subclasses are frozen dataclasses of static facts."""

    name: str
    layout: Layout
    positions: int
    reads_data: bool = True  # whether the gradient depends on the data operand

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`rows` (K, T, R), or (K, T) integers, and `columns` (K, T, C) of one example."""
        raise NotImplementedError


def is_real(dtype: DTypeLike) -> bool:
    """Whether a dtype is of real floats of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and not is_narrow(dtype)


def is_narrow(dtype: DTypeLike) -> bool:
    """Whether a dtype is of floats of fewer than 16 bits, which round gradients beyond use."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def _shape(operand: AbstractValue) -> tuple[int, ...]:
    return tuple(cast(ShapedArray, operand).shape)


@dataclasses.dataclass(frozen=True)
class Dot(Rule):
    """`dot_general` with the parameter on one side."""

    layout: Layout
    positions: int
    operand_axes: tuple[int, ...]
    parameter_first: bool
    name: str = "dot_general"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Dot":
        contracting, batch = eqn.params["dimension_numbers"]
        shapes = [_shape(v.aval) for v in eqn.invars]
        z, x = shapes[parameter], shapes[1 - parameter]
        z_contract, x_contract = contracting[parameter], contracting[1 - parameter]
        z_batch, x_batch = batch[parameter], batch[1 - parameter]
        z_free = tuple(i for i in range(len(z)) if i not in (*z_contract, *z_batch))
        x_free = tuple(i for i in range(len(x)) if i not in (*x_contract, *x_batch))
        return cls(
            Layout(z, tuple(z_batch), tuple(z_contract), z_free),
            math.prod(x[i] for i in x_free),
            (*x_batch, *x_free, *x_contract),
            parameter == 0,
        )

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, rows, columns = self.layout.sizes
        rows_of = operand.transpose(self.operand_axes).reshape(batch, self.positions, rows)
        if self.parameter_first:
            swapped = cotangent.reshape(batch, columns, self.positions)
            return rows_of, swapped.swapaxes(1, 2)
        return rows_of, cotangent.reshape(batch, self.positions, columns)


@dataclasses.dataclass(frozen=True)
class Convolution(Rule):
    """`conv_general_dilated` with the parameter as kernel."""

    layout: Layout
    positions: int
    numbers: lax.ConvDimensionNumbers
    kernel: tuple[int, ...]
    window: tuple[tuple[int, ...], ...]  # strides, input dilation, kernel dilation
    padding: tuple[tuple[int, int], ...]
    name: str = "conv_general_dilated"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Convolution | None":
        p = eqn.params
        if parameter != 1 or p["batch_group_count"] != 1:
            return None
        numbers, groups = p["dimension_numbers"], p["feature_group_count"]
        shape, out = _shape(eqn.invars[1].aval), _shape(eqn.outvars[0].aval)
        out_axis, in_axis, *spatial = numbers.rhs_spec
        split = (*shape[:out_axis], groups, shape[out_axis] // groups, *shape[out_axis + 1 :])
        moved = [i + (i > out_axis) for i in (*spatial, in_axis)]
        return cls(
            Layout(split, (out_axis,), tuple(moved), (out_axis + 1,)),
            math.prod(out) // shape[out_axis],
            numbers,
            tuple(shape[i] for i in spatial),
            (p["window_strides"], p["lhs_dilation"], p["rhs_dilation"]),
            tuple(p["padding"]),
        )

    def shifts(self, operand: jax.Array, out: tuple[int, ...]) -> list[jax.Array]:
        """What each kernel offset sees of the input: list of (N, *out, features)."""
        strides, interior, dilation = self.window
        lhs_n, lhs_c, *lhs_spatial = self.numbers.lhs_spec
        x = operand.transpose(lhs_n, *lhs_spatial, lhs_c)
        config = [(lo, hi, d - 1) for (lo, hi), d in zip(self.padding, interior, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
        seen = []
        for offset in _offsets(self.kernel):
            start = [o * d for o, d in zip(offset, dilation, strict=True)]
            stop = [s + (n - 1) * w + 1 for s, n, w in zip(start, out, strides, strict=True)]
            seen.append(
                lax.slice(
                    x,
                    (0, *start, 0),
                    (x.shape[0], *stop, x.shape[-1]),
                    (1, *strides, 1),
                )
            )
        return seen

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        groups, _, columns = self.layout.sizes
        out_n, out_c, *out_spatial = self.numbers.out_spec
        d = cotangent.transpose(out_n, *out_spatial, out_c)
        seen = self.shifts(operand, d.shape[1:-1])
        patches = jnp.stack(
            [s.reshape(self.positions, groups, -1) for s in seen], axis=2
        )  # (T, groups, offsets, features of the group)
        rows = patches.reshape(self.positions, groups, -1).swapaxes(0, 1)
        return rows, d.reshape(self.positions, groups, columns).swapaxes(0, 1)


def _offsets(kernel: tuple[int, ...]) -> list[tuple[int, ...]]:
    offsets: list[tuple[int, ...]] = [()]
    for size in kernel:
        offsets = [(*o, i) for o in offsets for i in range(size)]
    return offsets


@dataclasses.dataclass(frozen=True)
class Lookup(Rule):
    """Rows of a table chosen by the data: `gather` or `dynamic_slice` along one axis."""

    layout: Layout
    positions: int
    row_axes: tuple[int, ...]  # the axes of the output that run along a row
    size: int
    drop: bool  # an index outside the table has no gradient; else it is clamped
    name: str = "lookup"

    @classmethod
    def build_gather(cls, eqn: JaxprEqn, parameter: int) -> "Lookup | None":
        p = eqn.params
        d, shape = p["dimension_numbers"], _shape(eqn.invars[0].aval)
        if parameter != 0 or len(d.start_index_map) != 1 or d.operand_batching_dims:
            return None
        axis = d.start_index_map[0]
        full = all(n == m for i, (n, m) in enumerate(zip(shape, p["slice_sizes"], strict=True))
                   if i != axis)  # fmt: skip
        if tuple(d.collapsed_slice_dims) != (axis,) or not full:
            return None
        return cls(
            _table(shape, axis),
            math.prod(_shape(eqn.invars[1].aval)[:-1]),
            tuple(d.offset_dims),
            shape[axis],
            p["mode"] is not lax.GatherScatterMode.CLIP,
        )

    @classmethod
    def build_slice(cls, eqn: JaxprEqn, axis: int) -> "Lookup | None":
        shape, sizes = _shape(eqn.invars[0].aval), eqn.params["slice_sizes"]
        if sizes[axis] != 1 or any(n != m for i, (n, m) in enumerate(zip(shape, sizes, strict=True))
                                   if i != axis):  # fmt: skip
            return None
        rows = tuple(i for i in range(len(shape)) if i != axis)
        return cls(_table(shape, axis), 1, rows, shape[axis], False)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = jnp.moveaxis(cotangent, self.row_axes, range(-len(self.row_axes), 0))
        columns = columns.reshape(self.positions, -1)
        index = operand.reshape(self.positions)
        # In its own dtype: a narrower one would wrap around.
        last = min(self.size - 1, int(jnp.iinfo(index.dtype).max))
        clamped = jnp.clip(index, 0, last)
        if self.drop:
            columns = jnp.where((index == clamped)[:, None], columns, 0)
        return clamped.astype(jnp.int32)[None], columns[None]


def _table(shape: tuple[int, ...], axis: int) -> Layout:
    return Layout(shape, (), (axis,), tuple(i for i in range(len(shape)) if i != axis))


@dataclasses.dataclass(frozen=True)
class Shift(Rule):
    """A part of a parameter added to data or subtracted: the cotangent is its gradient.

    It is summed over the axes along which the part is repeated.
    """

    layout: Layout
    sign: int
    repeated: tuple[int, ...]
    positions: int = 1
    reads_data: bool = False
    name: str = "add"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Shift":
        shape, out = _shape(eqn.invars[parameter].aval), _shape(eqn.outvars[0].aval)
        aligned = shape or (1,) * len(out)  # a scalar goes with any shape
        repeated = tuple(i for i, (n, m) in enumerate(zip(aligned, out, strict=True)) if n != m)
        name = eqn.primitive.name
        sign = -1 if name == "sub" and parameter == 1 else 1
        return cls(Layout(shape, (), (), tuple(range(len(shape)))), sign, repeated, name=name)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns = jnp.sum(cotangent, axis=self.repeated).reshape(1, 1, -1)
        return jnp.full((1, 1, 1), self.sign, cotangent.dtype), columns


@dataclasses.dataclass(frozen=True)
class Beside(Rule):
    """A part of a parameter side by side with data: its gradient is its share of the cotangent."""

    layout: Layout
    axis: int
    start: int
    positions: int = 1
    reads_data: bool = False
    name: str = "concatenate"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Beside":
        axis = eqn.params["dimension"]
        before = sum(_shape(v.aval)[axis] for v in eqn.invars[:parameter])
        shape = _shape(eqn.invars[parameter].aval)
        return cls(Layout(shape, (), (), tuple(range(len(shape)))), axis, before)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        stop = self.start + self.layout.split[self.axis]
        share = lax.slice_in_dim(cotangent, self.start, stop, axis=self.axis)
        return jnp.ones((1, 1, 1), cotangent.dtype), share.reshape(1, 1, -1)


def find_rule(
    eqn: JaxprEqn, private: list[bool], parts: list[bool]
) -> tuple[Rule, int, int] | None:
    """The rule of a use, with the positions of the parameter and of the recorded data operand.

    `private[i]` says whether operand i depends on data (else it is made of parameters), `parts[i]`
    whether it is some entries of one parameter, not all.
    """
    name = eqn.primitive.name
    floats = [
        *eqn.outvars,
        *(eqn.invars if name in ("dot_general", "conv_general_dilated") else ()),
    ]
    if not eqn.outvars or not all(is_real(v.aval.dtype) for v in floats):
        return None
    rule: Rule | None = None
    if name == "dot_general":
        parameter, data = private.index(False), private.index(True)
        rule = Dot.build(eqn, parameter)
    elif name == "conv_general_dilated":
        parameter, data = private.index(False), private.index(True)
        rule = Convolution.build(eqn, parameter)
    elif name == "gather" and not private[0]:
        parameter, data = 0, 1
        rule = Lookup.build_gather(eqn, 0)
    elif name == "dynamic_slice" and not private[0] and sum(private) == 1:
        parameter, data = 0, private.index(True)
        rule = Lookup.build_slice(eqn, data - 1)
    elif name in ("add", "sub") and any(parts):
        parameter = parts.index(True)
        data = 1 - parameter
        rule = Shift.build(eqn, parameter)
    elif name == "concatenate" and any(parts):
        parameter, data = parts.index(True), private.index(True)
        rule = Beside.build(eqn, parameter)
    return None if rule is None else (rule, parameter, data)
