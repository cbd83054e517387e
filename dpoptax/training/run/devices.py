"""Selects the devices of a run: one, all of a process, or all of several hosts."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax.training import hosts


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
        mesh: Devices along an axis "data" that share each batch. None: one device.
    """

    mesh: Mesh | None = None

    @property
    def rows(self) -> NamedSharding | None:
        """The sharding of arrays with a leading axis of examples."""
        return None if self.mesh is None else NamedSharding(self.mesh, P("data"))

    def distribute(self, tree: Any) -> Any:
        """Places arrays, which must be equal on all hosts, on every device.

        Arrays that are sharded over the mesh stay sharded. All others are replicated.
        """
        if self.mesh is None:
            return jax.device_put(tree)
        return jax.tree.map(lambda x: hosts.place(x, self._sharding(x)), tree)

    def _sharding(self, x: Any) -> NamedSharding:
        """Returns the sharding of an array over the mesh."""
        assert self.mesh is not None
        given = x.sharding if isinstance(x, jax.Array) else None
        if (
            isinstance(given, NamedSharding)
            and given.mesh.axis_names == self.mesh.axis_names
            and np.array_equal(given.mesh.devices, self.mesh.devices)
        ):
            return NamedSharding(self.mesh, given.spec)
        return NamedSharding(self.mesh, P())


def start(parallel: str) -> Mesh | None:
    """Returns a mesh of all devices for `--parallel devices` or `hosts`, or None for "none".

    With "hosts", this process first joins the others.
    """
    if parallel == "none":
        return None
    if parallel == "hosts" and not jax.distributed.is_initialized():
        hosts.join()
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
