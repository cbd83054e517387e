"""Adds sums over the devices that share a batch, during the backward pass."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from dpoptax._ghost_clipping.factor_products import FactoredGradients, Segment
from dpoptax._losses.rules import FactorLayout
from dpoptax._rounding.block_sums import WholeBatch
from dpoptax._rounding.device_sums import MeshLayout, device_adder, names_of
from dpoptax._support.tree import PyTree

DeviceFunction = Callable[..., jax.Array]


class Slices(NamedTuple):
    """Cuts a sharded axis of a sum into slices that have `width` entries of each shard.

    Attributes:
      uncut: the layout of the whole sum.
      axis: the axis of the layout, the only one of its rows or of its columns.
      shards: the number of shards.
      size: the entries of a shard.
      width: the entries of a shard in each slice.
    """

    uncut: FactorLayout
    axis: int
    shards: int
    size: int
    width: int

    @classmethod
    def even(cls, uncut: FactorLayout, axis: int, shards: int, count: int) -> "Slices | None":
        """Returns up to `count` slices of an axis, or `None` for one slice."""
        size = uncut.split[axis] // shards
        width = -(-size // count)
        return None if width == size else cls(uncut, axis, shards, size, width)

    @property
    def layout(self) -> FactorLayout:
        """Returns the layout of a slice."""
        split, length = self.uncut.split, self.shards * self.width
        cut = (*split[: self.axis], length, *split[self.axis + 1 :])
        return dataclasses.replace(self.uncut, split=cut)

    @property
    def starts(self) -> list[int]:
        """Returns where the slices start in each shard. The last two may overlap."""
        return [min(i, self.size - self.width) for i in range(0, self.size, self.width)]

    def take(self, uncut: FactoredGradients, start: jax.Array | int) -> FactoredGradients:
        """Returns the factors of the slice that starts at `start` in each shard."""

        def cut(x: jax.Array) -> jax.Array:
            # The last axis is the sharded one, (…, shards · size). A slice takes the same entries
            # of every shard, so that each device keeps a part of each slice.
            by_shard = x.reshape(*x.shape[:-1], self.shards, self.size)
            part = lax.dynamic_slice_in_dim(by_shard, start, self.width, axis=-1)
            return part.reshape(*x.shape[:-1], self.shards * self.width)

        on_rows = self.uncut.rows == (self.axis,)
        segments = [
            Segment(cut(rows), columns) if on_rows else Segment(rows, cut(columns))
            for rows, columns in uncut.segments
        ]
        return FactoredGradients(segments, self.layout.sizes)


@dataclasses.dataclass(frozen=True)
class BatchDevices:
    """Describes the devices that share a batch; by default one device.

    Mesh axes other than those of the examples stay automatic.

    Attributes:
      mesh_layout: the mesh and its axes; `None` for one device.
      whole: the batch of all devices.
      bound: the bound of one summand.
      specs: how each parameter is sharded, a tree of `PartitionSpec`; `None` if it is not.
    """

    mesh_layout: MeshLayout | None = None
    whole: WholeBatch = WholeBatch(0)
    bound: float = 0.0
    specs: PyTree = None

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Returns the mesh axes over which examples are sharded; `None` for one device."""
        return None if self.mesh_layout is None else self.mesh_layout.axes

    @property
    def count(self) -> int:
        """Returns the number of devices that share the examples."""
        return 1 if self.mesh_layout is None else self.mesh_layout.shards

    def each(self, local: DeviceFunction) -> DeviceFunction:
        """Returns a function of arrays (B, …) that runs `local` on each device's examples.

        The results have a row for each example.
        """
        return self._on_each(local, P(self.axes))

    def add(
        self, local: Callable[..., Any], spec: P, slices: Slices | None = None
    ) -> DeviceFunction:
        """Returns a function of arrays (B, …) that adds `local`'s results over devices.

        Each device passes its own examples to `local`. With slices, `local(…)(start)` is the slice
        that starts at `start` in each shard. The whole sum is sharded according to `spec`.
        """
        if self.mesh_layout is None:
            return local
        spec = self.mesh_layout.batch_part(spec)
        add = device_adder(self.mesh_layout, self.whole, self.bound)

        def run(*arrays: jax.Array) -> jax.Array:
            total = local(*arrays)
            if slices is None:
                return add(total, spec)

            def turn(device_part: jax.Array, start: jax.Array) -> tuple[jax.Array, None]:
                part = add(total(start), spec)
                # Where the last two slices overlap, the entries are written twice, not added.
                return lax.dynamic_update_slice_in_dim(device_part, part, start, slices.axis), None

            # A slice has shards · width entries along the axis before the sum over devices, and
            # width after it. The part that a device keeps has `size`.
            kind = jax.eval_shape(total, 0)
            shape = (*kind.shape[: slices.axis], slices.size, *kind.shape[slices.axis + 1 :])
            device_part, _ = lax.scan(turn, jnp.zeros(shape, kind.dtype), jnp.array(slices.starts))
            return device_part

        return self._on_each(run, spec)

    def shards(self, spec: P, axis: int) -> int:
        """Returns the number of devices that an axis is sharded over."""
        batch_spec = P() if self.mesh_layout is None else self.mesh_layout.batch_part(spec)
        if self.mesh_layout is None or axis >= len(batch_spec):
            return 1
        return math.prod(self.mesh_layout.mesh.shape[name] for name in names_of(batch_spec[axis]))

    def _on_each(self, local: DeviceFunction, spec: P) -> DeviceFunction:
        if (layout := self.mesh_layout) is None:
            return local
        rows = P(layout.axes)

        def run(*arrays: jax.Array) -> jax.Array:
            mapped = jax.shard_map(
                local,
                mesh=layout.mesh,
                in_specs=rows,
                out_specs=spec,
                axis_names=frozenset(layout.axes),
                check_vma=False,
            )
            return mapped(*(layout.place(x, rows) for x in arrays))

        return run


ONE_DEVICE = BatchDevices()
