"""Defines the rules of lookups, and of additions of a part of a parameter to data."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from dpoptax._losses.rules import FactorLayout, Rule
from dpoptax._support.jaxprs import bind, type_of
from dpoptax._support.xla import materialize


@dataclasses.dataclass(frozen=True)
class Lookup(Rule):
    """Reads whole rows of a table at positions that depend on the data.

    This covers every `gather` and `dynamic_slice` that reads one row along one axis, and all
    entries along the others, from one or several stacked tables.

    Attributes:
      layout: the tables, the axis that is indexed, and the axes along a row.
      positions: the number of rows read from each table.
      index_axes: the axes of the indices in the order tables, lookups, components.
      component: the component of an index that belongs to the indexed axis.
      last: the largest start inside the table for each component; 0 along whole axes.
      output_axes: the axes of the output in the order tables, lookups, row.
      drop: whether a lookup outside the table has no gradient; otherwise it is clamped.
    """

    layout: FactorLayout
    positions: int
    index_axes: tuple[int, ...]
    component: int
    last: tuple[int, ...]
    output_axes: tuple[int, ...]
    drop: bool
    name: str = "lookup"
    is_lookup: bool = True

    @classmethod
    def build_gather(cls, eqn: JaxprEqn) -> "Lookup | None":
        d, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        shape = type_of(eqn.invars[0]).shape
        # The last axis of the indices holds the components of one start. The others are tables and
        # lookups.
        *lookups, _ = indices = type_of(eqn.invars[1]).shape
        tables = tuple(map(int, d.operand_batching_dims))
        axis = _indexed_axis(shape, sizes, tables, d.start_index_map)
        if axis is None:
            return None
        layout = _table_layout(shape, tables, axis)
        table_axes = tuple(map(int, d.start_indices_batching_dims))
        lookup_axes = tuple(i for i in range(len(lookups)) if i not in table_axes)
        # The output has the axes of the indices. At `offset_dims` it has the axes of the operand,
        # except collapsed axes and those of stacked tables.
        out = range(len(lookups) + len(d.offset_dims))
        index_positions = [i for i in out if i not in d.offset_dims]
        kept = [i for i in range(len(shape)) if i not in (*d.collapsed_slice_dims, *tables)]
        place = dict(zip(kept, map(int, d.offset_dims), strict=True))
        return cls(
            layout,
            math.prod(lookups[i] for i in lookup_axes),
            index_axes=(*table_axes, *lookup_axes, len(indices) - 1),
            component=d.start_index_map.index(axis),
            last=tuple(shape[i] - sizes[i] for i in d.start_index_map),
            output_axes=(
                *(index_positions[i] for i in (*table_axes, *lookup_axes)),
                # The indexed axis has size 1 in the output, or is collapsed and has no place.
                *(place[i] for i in (axis, *layout.columns) if i in place),
            ),
            # With `CLIP`, an index outside reads the nearest row. Otherwise it has no gradient.
            drop=eqn.params["mode"] is not lax.GatherScatterMode.CLIP,
        )

    @classmethod
    def build_slice(cls, eqn: JaxprEqn, axis: int) -> "Lookup | None":
        shape, sizes = type_of(eqn.invars[0]).shape, eqn.params["slice_sizes"]
        if _indexed_axis(shape, sizes, (), (axis,)) is None:
            return None
        layout = _table_layout(shape, (), axis)
        axes = (axis, *layout.columns)
        return cls(layout, 1, (), 0, (shape[axis] - 1,), output_axes=axes, drop=False)

    def factorize(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        tables, _, width = self.layout.sizes
        # Columns are (K, L, D), and starts (K, L, components).
        columns = cotangent.transpose(self.output_axes).reshape(tables, self.positions, width)
        starts = operand.transpose(self.index_axes).reshape(tables, self.positions, len(self.last))
        # Clamping in the dtype of the indices avoids wrapping around in a narrower dtype.
        most = int(jnp.iinfo(starts.dtype).max)
        clamped = jnp.clip(starts, 0, jnp.array([min(n, most) for n in self.last], starts.dtype))
        if self.drop:
            # An index is inside the table if clamping does not change it.
            inside = jnp.all(starts == clamped, axis=-1)
            columns = jnp.where(inside[..., None], columns, 0)
        return clamped[..., self.component].astype(jnp.int32), columns


def _indexed_axis(
    shape: tuple[int, ...], sizes: Sequence[int], tables: tuple[int, ...], indexed: Sequence[int]
) -> int | None:
    """Returns the axis along which whole rows are read; `None` for other slices."""
    # The axes that are read in part; a lookup has one, of which it reads one entry.
    cut = [i for i, n in enumerate(shape) if i not in tables and sizes[i] != n]
    axes = cut or [int(i) for i in indexed if sizes[i] == 1][:1]  # or a table of one row
    if len(axes) != 1 or axes[0] not in indexed or sizes[axes[0]] != 1:
        return None
    return axes[0]


def _table_layout(shape: tuple[int, ...], tables: tuple[int, ...], axis: int) -> FactorLayout:
    """Returns the layout of stacked tables that are indexed along one axis."""
    row = tuple(i for i in range(len(shape)) if i not in (*tables, axis))
    return FactorLayout(shape, tables, (axis,), row)


@dataclasses.dataclass(frozen=True)
class EntryUse(Rule):
    """Adds a part of a parameter to data, subtracts it, or concatenates it with data.

    The gradient is the cotangent, pulled back through the operation: summed over the axes along
    which the part is repeated, negated, or cut. It does not depend on the data.
    """

    layout: FactorLayout
    eqn: JaxprEqn
    place: int
    name: str
    positions: int = 1
    reads_data: bool = False

    @classmethod
    def build(cls, eqn: JaxprEqn, parameter: int) -> "EntryUse":
        shape = type_of(eqn.invars[parameter]).shape
        return cls(FactorLayout.last_axis(shape), eqn, parameter, eqn.primitive.name)

    def factorize(self, operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns factors with one row per matrix, which is 1."""
        # The operation is linear, so its derivative is the same at zero.
        operands = [jnp.zeros(type_of(v).shape, cotangent.dtype) for v in self.eqn.invars]

        def result(part: jax.Array) -> jax.Array:
            return bind(self.eqn, [*operands[: self.place], part, *operands[self.place + 1 :]])[0]

        (gradient,) = jax.vjp(result, operands[self.place])[1](cotangent)
        if gradient.size < cotangent.size and self.name != "concatenate":
            # A sum, stored, since XLA may compute it twice, with different rounding.
            gradient = materialize(gradient)
        stacks, _, columns = self.layout.sizes
        return jnp.ones((stacks, 1, 1), gradient.dtype), gradient.reshape(stacks, 1, columns)
