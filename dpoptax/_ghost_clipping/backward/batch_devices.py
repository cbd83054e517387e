"""Describes the devices that share a batch, for sums during the backward pass."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from dpoptax._support.tree import PyTree

DeviceFunction = Callable[..., jax.Array]


class Slices(NamedTuple):
    """Cuts a sharded axis into slices that have `width` entries of each shard.

    Attributes:
      axis: the axis.
      shards: the number of shards.
      size: the entries of a shard.
      width: the entries of a shard in each slice.
    """

    axis: int
    shards: int
    size: int
    width: int

    @classmethod
    def even(cls, axis: int, length: int, shards: int, count: int) -> "Slices | None":
        """Returns up to `count` slices of an axis of this length, or `None` for one slice."""
        size = length // shards
        width = -(-size // count)
        return None if width == size else cls(axis, shards, size, width)

    @property
    def length(self) -> int:
        """Returns the entries of a slice."""
        return self.shards * self.width

    @property
    def starts(self) -> list[int]:
        """Returns where the slices start in each shard. The last two may overlap."""
        return [min(i, self.size - self.width) for i in range(0, self.size, self.width)]

    def cut(self, x: jax.Array, start: jax.Array | int) -> jax.Array:
        """Returns the slice of the last axis of `x` that starts at `start` in each shard."""
        by_shard = x.reshape(*x.shape[:-1], self.shards, self.size)
        cut = lax.dynamic_slice_in_dim(by_shard, start, self.width, axis=-1)
        return cut.reshape(*x.shape[:-1], self.length)


class BatchDevices:
    """Describes the devices that share a batch; here one device.

    Attributes:
      specs: how each parameter is sharded, a tree of `PartitionSpec`; `None` if it is not.
    """

    specs: PyTree = None

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Returns the mesh axes over which examples are sharded; `None` for one device."""
        return None

    @property
    def count(self) -> int:
        """Returns the number of devices that share the examples."""
        return 1

    def add(self, local: DeviceFunction, spec: P) -> DeviceFunction:
        """Returns a function of arrays (B, …) that adds `local`'s results over devices.

        Each device passes its own examples to `local`. The sum is sharded according to `spec`.
        """
        del spec
        return local

    def each(self, local: DeviceFunction) -> DeviceFunction:
        """Returns a function of arrays (B, …) that runs `local` on each device's examples.

        The results have a row for each example.
        """
        return local

    def add_slices(
        self, local: Callable[..., DeviceFunction], spec: P, slices: Slices
    ) -> DeviceFunction:
        """Returns the function of `add` for results that are computed in slices.

        `local(…)(start)` is the slice that starts at `start` in each shard of `spec`.
        """
        raise NotImplementedError

    def shards(self, spec: P, axis: int) -> int:
        """Returns the number of devices that an axis is sharded over."""
        del spec, axis
        return 1


ONE_DEVICE = BatchDevices()
