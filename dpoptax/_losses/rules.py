"""Defines rules for operations whose gradients are sums of outer products.

A rule brings a use to one normal form. For one example, the gradient with respect to the derived
operand z, read as (K, R, D) by its `FactorLayout`, is

    G[k, r, d] = Σ_t rows[k, t, r] · columns[k, t, d].

`rows` comes from the data operand and `columns` from the cotangent of the output. L is the number
of positions, such as tokens, pixels or steps. If z is a lookup table, `rows` is one-hot and
represented by integers, (K, L). The rules for contractions are here, all others in `entry_rules`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from dpoptax._support.jaxprs import type_of
from dpoptax._support.tree import PyTree

# The numbers of stacked matrices, rows and columns: (K, R, D).
Sizes: TypeAlias = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class FactorLayout:
    """Describes how z is read as an array (K, R, D): a stack of matrices.

    z is reshaped to `split`. `stacks`, `rows` and `columns` are the axes of `split` for each side.
    The matrices of a stack are separate, such as the heads of an einsum.
    """

    split: tuple[int, ...]
    stacks: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def entrywise(cls, shape: tuple[int, ...]) -> "FactorLayout":
        """Returns the layout with one row, whose columns are the entries."""
        return cls(shape, (), (), tuple(range(len(shape))))

    @classmethod
    def last_axis(cls, shape: tuple[int, ...]) -> "FactorLayout":
        """Returns the layout whose columns are along the last axis, in matrices of one row.

        On TPU, which tiles the last two axes, joining them would copy the gradient.
        """
        axes = tuple(range(len(shape)))
        return cls(shape, axes[:-1], (), axes[-1:])

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.stacks, self.rows, self.columns

    @property
    def sizes(self) -> Sizes:
        stacks, rows, columns = (math.prod(self.split[i] for i in axes) for axes in self.sides)
        return stacks, rows, columns

    def fold(self, gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshapes a gradient (K, R, D) to the shape of z."""
        # A gradient has the axes of `split`, but in the order of the sides. They move back to their
        # places.
        order = (*self.stacks, *self.rows, *self.columns)
        cut = gradient.reshape([self.split[i] for i in order])
        return cut.transpose([order.index(i) for i in range(len(order))]).reshape(shape)

    def stacked(self, length: int) -> "FactorLayout":
        """Returns the layout of z with one more leading axis, which goes to the stacks."""
        stacks, rows, columns = (tuple(i + 1 for i in axes) for axes in self.sides)
        return FactorLayout((length, *self.split), (0, *stacks), rows, columns)


class Rule:
    """Base class for rules. Subclasses are frozen dataclasses of static values."""

    name: str
    layout: FactorLayout
    positions: int
    reads_data: bool = True  # whether the gradient depends on the data operand
    is_lookup: bool = False  # whether rows are one-hot, represented by integers

    def factorize(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `rows` and `columns` of one example.

        Rows are (K, L, R), or integers (K, L). Columns are (K, L, D).
        """
        raise NotImplementedError

    def row_parts(
        self, operand: jax.Array, cotangent: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the factors with equal parts of the rows, whose gradients are joined along R.

        On TPU, a product for each part costs less than copying all parts to one array.
        """
        return [self.factorize(operand, cotangent)]


@dataclasses.dataclass(frozen=True)
class Dot(Rule):
    """Gives the factors of a `dot_general` of the parameter and data."""

    layout: FactorLayout
    positions: int
    operand_axes: tuple[int, ...]
    parameter_first: bool
    name: str = "dot_general"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Dot":
        contracting, batch = eqn.params["dimension_numbers"]
        shapes = [type_of(v).shape for v in eqn.invars]
        # z[k, r, d] · x[k, l, r]: batch axes are stacks k, contracted axes rows r, free axes of z
        # columns d, and those of x positions l. JAX lists contracted axes in pairs, so r has one
        # order.
        z, x = shapes[parameter], shapes[1 - parameter]
        z_contract, x_contract = contracting[parameter], contracting[1 - parameter]
        z_batch, x_batch = batch[parameter], batch[1 - parameter]
        z_free = tuple(i for i in range(len(z)) if i not in (*z_contract, *z_batch))
        x_free = tuple(i for i in range(len(x)) if i not in (*x_contract, *x_batch))
        return cls(
            FactorLayout(z, tuple(z_batch), tuple(z_contract), z_free),
            math.prod(x[i] for i in x_free),
            (*x_batch, *x_free, *x_contract),
            parameter == 0,
        )

    def factorize(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        stacks, rows, columns = self.layout.sizes
        # The output has the batch axes, the free axes of the first operand, then of the second.
        rows_of = operand.transpose(self.operand_axes).reshape(stacks, self.positions, rows)
        if self.parameter_first:
            swapped = cotangent.reshape(stacks, columns, self.positions)
            return rows_of, swapped.swapaxes(1, 2)
        return rows_of, cotangent.reshape(stacks, self.positions, columns)


@dataclasses.dataclass(frozen=True)
class Convolution(Rule):
    """Gives the factors of a `conv_general_dilated` whose kernel is the parameter.

    `rows` are the patches of the input for each output position, as in im2col.
    """

    layout: FactorLayout
    positions: int
    numbers: lax.ConvDimensionNumbers
    kernel: tuple[int, ...]
    window: tuple[tuple[int, ...], ...]  # strides, input dilation, kernel dilation
    padding: tuple[tuple[int, int], ...]
    name: str = "conv_general_dilated"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Convolution | None":
        p = eqn.params
        # A parameter that is convolved like an image, and groups of a batch, have no rule.
        if parameter != 1 or p["batch_group_count"] != 1:
            return None
        numbers, groups = p["dimension_numbers"], p["feature_group_count"]
        shape, out = type_of(eqn.invars[1]).shape, type_of(eqn.outvars[0]).shape
        # The kernel is a matrix of offsets and input channels by output channels. Groups divide the
        # output channels.
        out_axis, in_axis, *spatial = numbers.rhs_spec
        layout = FactorLayout(shape, (), (*spatial, in_axis), (out_axis,))
        if groups > 1:
            # Output channels (C,) become (groups, C / groups), so later axes move by one.
            split = (*shape[:out_axis], groups, shape[out_axis] // groups, *shape[out_axis + 1 :])
            moved = tuple(i + (i > out_axis) for i in layout.rows)
            layout = FactorLayout(split, (out_axis,), moved, (out_axis + 1,))
        return cls(
            layout,
            # One position for each image and pixel of the output.
            math.prod(out) // shape[out_axis],
            numbers,
            tuple(shape[i] for i in spatial),
            (p["window_strides"], p["lhs_dilation"], p["rhs_dilation"]),
            tuple(p["padding"]),
        )

    def factorize(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        columns, out = self._columns(cotangent)

        def together(operand: jax.Array) -> jax.Array:
            # (L, K, R): R runs over kernel offsets, then over input channels, like `layout.rows`.
            return jnp.concatenate(self._shifts(operand, out), axis=2)

        gathered = functools.partial(self._patches, out=out)
        patches: jax.Array = lax.platform_dependent(operand, cpu=gathered, default=together)
        return patches.swapaxes(0, 1), columns

    def row_parts(
        self, operand: jax.Array, cotangent: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        columns, out = self._columns(cotangent)
        return [(part.swapaxes(0, 1), columns) for part in self._shifts(operand, out)]

    def _columns(self, cotangent: jax.Array) -> tuple[jax.Array, tuple[int, ...]]:
        """Returns the columns, (K, L, D), and the numbers of output positions along each axis."""
        stacks, _, columns = self.layout.sizes
        out_n, out_c, *out_spatial = self.numbers.out_spec
        d = cotangent.transpose(out_n, *out_spatial, out_c)
        return d.reshape(self.positions, stacks, columns).swapaxes(0, 1), d.shape[1:-1]

    def _images(self, operand: jax.Array) -> jax.Array:
        """Returns the input, (N, *spatial, features)."""
        lhs_n, lhs_c, *lhs_spatial = self.numbers.lhs_spec
        return operand.transpose(lhs_n, *lhs_spatial, lhs_c)

    def _shifts(self, operand: jax.Array, out: tuple[int, ...]) -> list[jax.Array]:
        """Returns the part of the input for each kernel offset, (L, K, features)."""
        x, (strides, lhs_dilation, dilation) = self._images(operand), self.window
        config = [(lo, hi, d - 1) for (lo, hi), d in zip(self.padding, lhs_dilation, strict=True)]
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
        seen = []
        for offset in np.ndindex(self.kernel):
            # Output position p reads the input at p · stride + offset · dilation.
            start = [o * d for o, d in zip(offset, dilation, strict=True)]
            stop = [s + (n - 1) * w + 1 for s, n, w in zip(start, out, strides, strict=True)]
            part = lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *strides, 1))
            seen.append(part.reshape(self.positions, self.layout.sizes[0], -1))
        return seen

    def _patches(self, operand: jax.Array, out: tuple[int, ...]) -> jax.Array:
        """Returns all parts of the input, (L, K, R), by one gather.

        XLA on CPU compiles it several times as fast as slices that are joined. With few channels it
        also runs faster, with several hundred slower.
        """
        x, stacks = self._images(operand), self.layout.sizes[0]
        places = self._places(x.shape[1:-1], out)
        pixels = x.reshape(x.shape[0], -1, stacks, x.shape[-1] // stacks)
        # (N, positions of an image, kernel offsets, K, features); 0 at places beyond the pixels.
        found = jnp.take(pixels, places, axis=1, mode="fill", fill_value=0)
        return found.swapaxes(2, 3).reshape(self.positions, stacks, -1)

    def _places(self, size: tuple[int, ...], out: tuple[int, ...]) -> np.ndarray:
        """Returns the number of the pixel that an output position reads at each kernel offset.

        The shape is (positions of an image, kernel offsets). Padding has the number of all pixels.
        """
        pixel, inside = np.zeros([], int), np.ones([], bool)
        for axis, (n, k) in enumerate(zip(out, self.kernel, strict=True)):
            stride, lhs_dilation, dilation = (each[axis] for each in self.window)
            # Output position p reads the dilated input at p · stride + offset · dilation − padding.
            reads = np.arange(n)[:, None] * stride + np.arange(k) * dilation - self.padding[axis][0]
            # One axis for the positions along each axis of the image, and one for the offsets.
            shape = [1] * (2 * len(out))
            shape[axis], shape[len(out) + axis] = n, k
            here, between = np.divmod(reads.reshape(shape), lhs_dilation)
            inside = inside & (between == 0) & (here >= 0) & (here < size[axis])
            pixel = pixel * size[axis] + here
        places = np.where(inside, pixel, math.prod(size))
        return places.reshape(math.prod(out), -1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Repeated(Rule):
    """Gives the factors of a use inside scans, for all steps together.

    Steps of scans become positions L. If the value has a slice for each step, they become stacks K.

    Attributes:
      rule: the rule for one step.
      loops: (length, stacked) of each enclosing scan.
    """

    rule: Rule
    loops: tuple[tuple[int, bool], ...]
    layout: FactorLayout
    positions: int
    name: str
    reads_data: bool
    is_lookup: bool

    @classmethod
    def build(cls, rule: Rule, loops: tuple[tuple[int, bool], ...]) -> "Repeated":
        # The innermost scan comes first, so that the steps of the outermost one lead.
        layout = rule.layout
        for length, stacked in reversed(loops):
            layout = layout.stacked(length) if stacked else layout
        positions = rule.positions * math.prod(n for n, stacked in loops if not stacked)
        kind = rule.name, rule.reads_data, rule.is_lookup
        return cls(rule, loops, layout, positions, *kind)

    def factorize(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, columns = self._map_steps(self.rule.factorize)(operand, cotangent)
        return self._fold_steps(rows), self._fold_steps(columns)

    def row_parts(
        self, operand: jax.Array, cotangent: jax.Array
    ) -> list[tuple[jax.Array, jax.Array]]:
        parts = self._map_steps(self.rule.row_parts)(operand, cotangent)
        return [(self._fold_steps(rows), self._fold_steps(columns)) for rows, columns in parts]

    def _map_steps(self, factorize: Callable[..., PyTree]) -> Callable[..., PyTree]:
        for _ in self.loops:
            factorize = jax.vmap(factorize)
        return factorize

    def _fold_steps(self, factor: jax.Array) -> jax.Array:
        # (*steps, K, L, …) becomes (stacked steps · K, shared steps · L, …).
        lead = len(self.loops)
        stacked = [i for i, (_, s) in enumerate(self.loops) if s]
        shared = [i for i, (_, s) in enumerate(self.loops) if not s]
        # Scans over stacked parameters give stacks and all others positions, outermost first.
        order = (*stacked, lead, *shared, *range(lead + 1, factor.ndim))
        stacks, _, _ = self.layout.sizes
        trailing = factor.shape[lead + 2 :]
        return factor.transpose(order).reshape(stacks, self.positions, *trailing)
