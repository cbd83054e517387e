"""Describes the devices that share a batch, for sums that are computed use by use."""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

DeviceFunction = Callable[..., jax.Array]


class BatchDevices:
    """Describes the devices that share a batch; here one device."""

    @property
    def axes(self) -> tuple[str, ...] | None:
        """Returns the mesh axes that the examples are sharded over, `None` for one device."""
        return None

    def add(self, local: DeviceFunction, spec: P) -> DeviceFunction:
        """Returns a function of arrays (B, …) that adds the results of `local` of all devices.

        `local` gets each device's own examples. The sum is sharded by `spec`.
        """
        del spec
        return local

    def each(self, local: DeviceFunction) -> DeviceFunction:
        """Returns a function of arrays (B, …) that runs `local` on each device's own examples.

        The results have a row for each example.
        """
        return local

    def add_slices(
        self, local: Callable[..., DeviceFunction], spec: P, axis: int, count: int
    ) -> DeviceFunction:
        """Returns the same where `local(…)(index)` is one of `count` slices along `axis`.

        Each slice holds the same number of the shards that `spec` has along the axis.
        """
        raise NotImplementedError

    def shards(self, spec: P, axis: int) -> int:
        """Returns the number of devices that an axis is sharded over."""
        del spec, axis
        return 1
