"""Runs one program on several hosts: they find each other, and share arrays.

Each host runs the same program. See `docs/guides/several-hosts.md`.
"""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = ["join", "replicate"]


def __dir__() -> list[str]:
    return __all__


def join() -> None:
    """Joins this process to the others of a run, before any other use of JAX.

    It calls `jax.distributed.initialize`, which detects TPU pods, Slurm and Open MPI. Elsewhere,
    set the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    """
    number, rank = (os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
    jax.distributed.initialize(
        num_processes=None if number is None else int(number),
        process_id=None if rank is None else int(rank),
    )


def start(parallel: str) -> Mesh | None:
    """Returns a mesh of all devices for `--parallel devices` or `hosts`, or None for "none".

    With "hosts", this process first joins the others.
    """
    if parallel == "none":
        return None
    if parallel == "hosts" and not jax.distributed.is_initialized():
        join()
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Places arrays, which must be equal on all hosts, on every device of a mesh.

    All hosts must call this, also to gather arrays that are sharded over the mesh.

    Args:
      tree: a tree of arrays and random keys, such as the initial parameters or `tx.init(params)`.
      mesh: devices of one or several hosts.

    >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    >>> replicate({"w": np.zeros(3)}, mesh)["w"].sharding.is_fully_replicated
    True
    """
    return jax.tree.map(lambda x: place(jnp.asarray(x), NamedSharding(mesh, P())), tree)


def place(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places an array, sharded over hosts or equal on all, on the devices of a sharding."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda x: x, out_shardings=sharding)(x)
    # `device_put` rejects devices of other hosts for arrays that are already on a device.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = place(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
