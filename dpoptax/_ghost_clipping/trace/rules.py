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
from jax.core import AbstractValue, ShapedArray
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Layout:
    """How z is cut: reshape to `split`, then gather its axes into batch K, rows R, columns C."""

    split: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def entrywise(cls, shape: tuple[int, ...]) -> "Layout":
        """Each entry is a column, of the one row that there is."""
        return cls(shape, (), (), tuple(range(len(shape))))

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.batch, self.rows, self.columns

    @property
    def sizes(self) -> tuple[int, int, int]:
        batch, rows, columns = (math.prod(self.split[i] for i in axes) for axes in self.sides)
        return batch, rows, columns

    def fold(self, gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """(K, R, C) back to the shape of z."""
        order = (*self.batch, *self.rows, *self.columns)
        cut = gradient.reshape([self.split[i] for i in order])
        return cut.transpose([order.index(i) for i in range(len(order))]).reshape(shape)

    def stacked(self, length: int) -> "Layout":
        """The layout of z with one more leading axis, which becomes batch."""
        batch, rows, columns = (tuple(i + 1 for i in axes) for axes in self.sides)
        return Layout((length, *self.split), (0, *batch), rows, columns)


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


def shape_of(operand: AbstractValue) -> tuple[int, ...]:
    """The shape of an operand in a trace."""
    return tuple(cast(ShapedArray, operand).shape)
