"""Selects the devices of a run: one, all of this process, or all of several hosts."""

import dataclasses
import hashlib
import os
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of a run.

    Attributes:
        mesh: Its devices along one axis, "data", that batches are split over; None: one device.
    """

    mesh: Mesh | None = None

    @property
    def rows(self) -> NamedSharding | None:
        """The sharding of arrays whose leading axis counts examples."""
        return None if self.mesh is None else NamedSharding(self.mesh, P("data"))

    @property
    def everywhere(self) -> NamedSharding | None:
        """The sharding of replicated arrays."""
        return None if self.mesh is None else NamedSharding(self.mesh, P())

    def replicate(self, tree: Any) -> Any:
        """Replicates `tree`, which must be the same on all hosts, on every device."""
        everywhere = self.everywhere
        if everywhere is None:
            return jax.device_put(tree)
        return jax.tree.map(lambda x: _put(x, everywhere), tree)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    # Not `device_put`: it refuses devices of other hosts for arrays that are on one of ours.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def start(parallel: str) -> Devices:
    """Returns the devices for a config's `parallel`.

    With "hosts" this process joins the others first, by `jax.distributed.initialize`: on TPU pods,
    under Slurm and under Open MPI it finds them by itself; elsewhere the environment variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID name them.
    """
    if parallel == "none":
        return Devices()
    if parallel == "hosts" and not jax.distributed.is_initialized():
        number, rank = (os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
        jax.distributed.initialize(
            num_processes=None if number is None else int(number),
            process_id=None if rank is None else int(rank),
        )
    devices = jax.devices()
    return Devices(jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,)))


def fresh_seed(bits: int) -> int:
    """Draws a seed of a number of random bits, the same on all hosts."""
    seed = secrets.randbits(bits)
    if jax.process_count() == 1:
        return seed
    words = np.frombuffer(seed.to_bytes(-(-bits // 32) * 4, "little"), "<u4")
    return int.from_bytes(multihost_utils.broadcast_one_to_all(words).tobytes(), "little")


def same_on_all_hosts(text: str) -> bool:
    """Returns whether all hosts, each of which calls this, have the same text."""
    if jax.process_count() == 1:
        return True
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))
