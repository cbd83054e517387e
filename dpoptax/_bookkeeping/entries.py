"""Entries of a parameter that stand by themselves: looked up, added to data, or beside it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from dpoptax._bookkeeping.rules import Layout, Rule, shape_of
from dpoptax._trees import held


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
    def build_gather(cls, eqn: JaxprEqn) -> "Lookup | None":
        p = eqn.params
        d, shape = p["dimension_numbers"], shape_of(eqn.invars[0].aval)
        if len(d.start_index_map) != 1 or d.operand_batching_dims:
            return None
        axis = d.start_index_map[0]
        row = (*shape[:axis], 1, *shape[axis + 1 :])
        if tuple(d.collapsed_slice_dims) != (axis,) or tuple(p["slice_sizes"]) != row:
            return None
        return cls(
            _table(shape, axis),
            math.prod(shape_of(eqn.invars[1].aval)[:-1]),
            tuple(d.offset_dims),
            shape[axis],
            p["mode"] is not lax.GatherScatterMode.CLIP,
        )

    @classmethod
    def build_slice(cls, eqn: JaxprEqn, axis: int) -> "Lookup | None":
        shape, sizes = shape_of(eqn.invars[0].aval), eqn.params["slice_sizes"]
        if tuple(sizes) != (*shape[:axis], 1, *shape[axis + 1 :]):
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
        shape, out = shape_of(eqn.invars[parameter].aval), shape_of(eqn.outvars[0].aval)
        aligned = shape or (1,) * len(out)  # a scalar goes with any shape
        repeated = tuple(i for i, (n, m) in enumerate(zip(aligned, out, strict=True)) if n != m)
        name = eqn.primitive.name
        sign = -1 if name == "sub" and parameter == 1 else 1
        return cls(Layout.entrywise(shape), sign, repeated, name=name)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.repeated:  # stored: a sum may be rounded in one of several ways
            cotangent = held(jnp.sum(cotangent, axis=self.repeated))
        return jnp.full((1, 1, 1), self.sign, cotangent.dtype), cotangent.reshape(1, 1, -1)


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
        before = sum(shape_of(v.aval)[axis] for v in eqn.invars[:parameter])
        shape = shape_of(eqn.invars[parameter].aval)
        return cls(Layout.entrywise(shape), axis, before)

    def factors(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        stop = self.start + self.layout.split[self.axis]
        share = lax.slice_in_dim(cotangent, self.start, stop, axis=self.axis)
        return jnp.ones((1, 1, 1), cotangent.dtype), share.reshape(1, 1, -1)
