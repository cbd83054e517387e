"""Selects the devices of a run: one, all of a process, or all of several hosts."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax.training import hosts


def distribute(tree: Any, mesh: Mesh | None) -> Any:
    """Places arrays, which must be equal on all hosts, on every device.

    Arrays that are sharded over the mesh stay sharded. All others are replicated.
    """
    if mesh is None:
        return jax.device_put(tree)

    def sharding(x: Any) -> NamedSharding:
        given = x.sharding if isinstance(x, jax.Array) else None
        if (
            isinstance(given, NamedSharding)
            and given.mesh.axis_names == mesh.axis_names
            and np.array_equal(given.mesh.devices, mesh.devices)
        ):
            return NamedSharding(mesh, given.spec)
        return NamedSharding(mesh, P())

    return jax.tree.map(lambda x: hosts.place(x, sharding(x)), tree)


def start(parallel: str) -> Mesh | None:
    """Returns a mesh of all devices for `--parallel devices` or `hosts`, or None for "none".

    With "hosts", this process first joins the others.
    """
    if parallel == "none":
        return None
    if parallel == "hosts" and not jax.distributed.is_initialized():
        hosts.join()
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
