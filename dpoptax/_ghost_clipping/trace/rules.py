"""Defines rules: operations whose gradient by a parameter is a sum of outer products.

A rule brings a use to one normal form. For one example, the gradient by the derived operand z, cut
into (K, R, D) by its `FactorLayout`, is

    G[k, r, c] = Σ_t rows[k, t, r] · columns[k, t, c].

`rows` comes from the data operand and `columns` from the cotangent of the output. L is the number
of positions: tokens, pixels or steps. If z is a table that is looked up, `rows` is one-hot and held
as integers, (K, L).
"""

import dataclasses
import math
from typing import TypeAlias, cast

import jax
import jax.numpy as jnp
from jax.core import AbstractValue, ShapedArray
from jax.typing import DTypeLike

# The sizes of batch, rows and columns: (K, R, D).
Sizes: TypeAlias = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class FactorLayout:
    """Says how z is cut: reshaped to `split`, whose axes go to batch K, rows R and columns C."""

    split: tuple[int, ...]
    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @classmethod
    def entrywise(cls, shape: tuple[int, ...]) -> "FactorLayout":
        """Returns the layout with one row, in which each entry is a column."""
        return cls(shape, (), (), tuple(range(len(shape))))

    @property
    def sides(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return self.batch, self.rows, self.columns

    @property
    def sizes(self) -> Sizes:
        batch, rows, columns = (math.prod(self.split[i] for i in axes) for axes in self.sides)
        return batch, rows, columns

    def fold(self, gradient: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Returns a gradient (K, R, D) in the shape of z."""
        order = (*self.batch, *self.rows, *self.columns)
        cut = gradient.reshape([self.split[i] for i in order])
        return cut.transpose([order.index(i) for i in range(len(order))]).reshape(shape)

    def stacked(self, length: int) -> "FactorLayout":
        """Returns the layout of z with one more leading axis, which becomes batch."""
        batch, rows, columns = (tuple(i + 1 for i in axes) for axes in self.sides)
        return FactorLayout((length, *self.split), (0, *batch), rows, columns)


class Rule:
    """Base of rules; subclasses are frozen dataclasses of static facts."""

    name: str
    layout: FactorLayout
    positions: int
    reads_data: bool = True  # whether the gradient depends on the data operand

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `rows` (K, L, R), or integers (K, L), and `columns` (K, L, D) of one example."""
        raise NotImplementedError


def is_real(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is a real float of 16 bits or more."""
    return jnp.issubdtype(dtype, jnp.floating) and not is_narrow(dtype)


def is_narrow(dtype: DTypeLike) -> bool:
    """Returns whether a dtype is a float of fewer than 16 bits, not enough for gradients."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 16


def shape_of(operand: AbstractValue) -> tuple[int, ...]:
    """Returns the shape of an operand in a trace."""
    return tuple(cast(ShapedArray, operand).shape)
