"""Gives the rules of contractions: `dot_general`, and convolutions with a parameter as kernel."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from dpoptax._ghost_clipping.trace.rules import FactorLayout, Rule, shape_of


@dataclasses.dataclass(frozen=True)
class Dot(Rule):
    """Gives the factors of a `dot_general` whose one operand is the parameter."""

    layout: FactorLayout
    positions: int
    operand_axes: tuple[int, ...]
    parameter_first: bool
    name: str = "dot_general"

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "Dot":
        contracting, batch = eqn.params["dimension_numbers"]
        shapes = [shape_of(v.aval) for v in eqn.invars]
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

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch, rows, columns = self.layout.sizes
        rows_of = operand.transpose(self.operand_axes).reshape(batch, self.positions, rows)
        if self.parameter_first:
            swapped = cotangent.reshape(batch, columns, self.positions)
            return rows_of, swapped.swapaxes(1, 2)
        return rows_of, cotangent.reshape(batch, self.positions, columns)


@dataclasses.dataclass(frozen=True)
class Convolution(Rule):
    """Gives the factors of a `conv_general_dilated` whose kernel is the parameter.

    `rows` are the patches of the input that each output position reads, as in im2col.
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
        if parameter != 1 or p["batch_group_count"] != 1:
            return None
        numbers, groups = p["dimension_numbers"], p["feature_group_count"]
        shape, out = shape_of(eqn.invars[1].aval), shape_of(eqn.outvars[0].aval)
        out_axis, in_axis, *spatial = numbers.rhs_spec
        split = (*shape[:out_axis], groups, shape[out_axis] // groups, *shape[out_axis + 1 :])
        moved = [i + (i > out_axis) for i in (*spatial, in_axis)]
        return cls(
            FactorLayout(split, (out_axis,), tuple(moved), (out_axis + 1,)),
            math.prod(out) // shape[out_axis],
            numbers,
            tuple(shape[i] for i in spatial),
            (p["window_strides"], p["lhs_dilation"], p["rhs_dilation"]),
            tuple(p["padding"]),
        )

    def shifts(self, operand: jax.Array, out: tuple[int, ...]) -> list[jax.Array]:
        """Returns the input as each kernel offset reads it: a list of (N, *out, features)."""
        strides, interior, dilation = self.window
        lhs_n, lhs_c, *lhs_spatial = self.numbers.lhs_spec
        x = operand.transpose(lhs_n, *lhs_spatial, lhs_c)
        config = [(lo, hi, d - 1) for (lo, hi), d in zip(self.padding, interior, strict=True)]
        # Padding and input dilation are made explicit, so that each offset is a strided slice.
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *config, (0, 0, 0)])
        seen = []
        for offset in np.ndindex(self.kernel):
            start = [o * d for o, d in zip(offset, dilation, strict=True)]
            stop = [s + (n - 1) * w + 1 for s, n, w in zip(start, out, strides, strict=True)]
            seen.append(
                lax.slice(x, (0, *start, 0), (x.shape[0], *stop, x.shape[-1]), (1, *strides, 1))
            )
        return seen

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        groups, _, columns = self.layout.sizes
        out_n, out_c, *out_spatial = self.numbers.out_spec
        d = cotangent.transpose(out_n, *out_spatial, out_c)
        seen = self.shifts(operand, d.shape[1:-1])
        patches = jnp.stack(
            [s.reshape(self.positions, groups, -1) for s in seen], axis=2
        )  # (L, groups, offsets, features of the group)
        rows = patches.reshape(self.positions, groups, -1).swapaxes(0, 1)
        return rows, d.reshape(self.positions, groups, columns).swapaxes(0, 1)
