"""Selects the devices of a run: one, all of a process, or all of several hosts."""

import dataclasses
import hashlib
import os
import secrets
from typing import Any, Literal

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
        return jax.tree.map(lambda x: _put(x, self._sharding(x)), tree)

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


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return jax.device_put(x, sharding)
    # `device_put` rejects devices of other hosts for arrays that are already on a device.
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def start(parallel: str) -> Devices:
    """Returns the devices for a config's `parallel`.

    With "hosts", this process first calls `jax.distributed.initialize`. It detects TPU pods, Slurm
    and Open MPI. Elsewhere, set the environment variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID.
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


def shared_secrets(
    generator: Literal["threefry", "chacha20"] = "threefry",
) -> tuple[int | bytes, jax.Array]:
    """Draws the sampler seed and the noise key of one run, equal on all hosts.

    One host draws them from the operating system and sends them to the others. All hosts must call
    this at the same point of the program, after `jax.distributed.initialize()`. In a single process
    it returns the same kinds of values. `dpoptax.training.fit` calls it, unless it is given both or
    continues a run.

    Privacy: seed and key are secret, and each run needs its own. A run that is continued needs
    those that it began with: keep them in its checkpoint.

    Args:
      generator: the generator of the noise, as for `dpoptax.random_key_from_os`. With "chacha20",
        the seed has 32 bytes, and draws are cryptographic as well.

    Returns:
      The seed, for `PrivacyPlan`, and the key, for `plan.noise`.

    Raises:
      ValueError: the generator is unknown.

    >>> seed, key = shared_secrets()
    >>> seed < 2**128, key.shape
    (True, ())
    """
    if generator not in ("threefry", "chacha20"):
        raise ValueError(f"`generator` must be 'threefry' or 'chacha20', got {generator!r}.")
    if generator == "chacha20":
        drawn = _shared_bytes(64)
        return drawn[:32], jnp.asarray(np.frombuffer(drawn[32:], np.uint32))
    drawn = _shared_bytes(24)
    key = jax.random.wrap_key_data(np.frombuffer(drawn[16:], np.uint32), impl="threefry2x32")
    return int.from_bytes(drawn[:16], "little"), key


def fresh_seed(bits: int) -> int:
    """Draws a seed with this number of random bits, equal on all hosts."""
    drawn = int.from_bytes(_shared_bytes(-(-bits // 32) * 4), "little")
    return drawn >> (-bits % 32)


def _shared_bytes(number: int) -> bytes:
    """Draws a multiple of four random bytes, equal on all hosts."""
    drawn = secrets.token_bytes(number)
    if jax.process_count() == 1:
        return drawn
    words = multihost_utils.broadcast_one_to_all(np.frombuffer(drawn, np.uint32))
    return np.asarray(words).tobytes()


def same_on_all_hosts(text: str) -> bool:
    """Returns whether all hosts call this with the same text."""
    if jax.process_count() == 1:
        return True
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))
