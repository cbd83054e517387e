"""Describes the devices that share a batch, for sums during the backward pass."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from dpoptax._tree import PyTree

DeviceFunction = Callable[..., jax.Array]


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
        self, local: Callable[..., DeviceFunction], spec: P, axis: int, count: int
    ) -> DeviceFunction:
        """Returns the function of `add` for results that are computed in slices.

        `local(…)(index)` is one of `count` slices along `axis`. Each slice covers the same number
        of shards of `spec`.
        """
        raise NotImplementedError

    def shards(self, spec: P, axis: int) -> int:
        """Returns the number of devices that an axis is sharded over."""
        del spec, axis
        return 1
