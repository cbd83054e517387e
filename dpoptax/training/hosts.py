"""Runs one program on several hosts: they find each other, and share secrets and arrays.

Each host runs the same program. See `docs/guides/several-hosts.md`.
"""

import hashlib
import os
import secrets
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax.training.data import streaming

__all__ = ["check_same", "join", "replicate", "shared_secrets"]


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


def shared_secrets(
    generator: Literal["threefry", "chacha20"] = "threefry",
) -> tuple[int | bytes, jax.Array]:
    """Draws the sampler seed and the noise key of one run, equal on all hosts.

    One host draws them from the operating system and sends them to the others. All hosts must call
    this at the same point of the program, after `join`. In a single process
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
        drawn = shared_bytes(64)
        return drawn[:32], jnp.asarray(np.frombuffer(drawn[32:], np.uint32))
    drawn = shared_bytes(24)
    key = jax.random.wrap_key_data(
        jnp.asarray(np.frombuffer(drawn[16:], np.uint32)), impl="threefry2x32"
    )
    return int.from_bytes(drawn[:16], "little"), key


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


def check_same(data: streaming.Source) -> None:
    """Raises an error on all hosts unless each has the same data in the same order.

    Each host reads all of its data once. Arrays and memory-mapped files take about a second for a
    gigabyte. `dpoptax.training.fit` does this itself.

    Privacy: in another order, one example can be in the rows of two hosts and count twice. The
    stated ε would then be too small.

    Args:
      data: as for `dpoptax.training.fit`.

    Raises:
      ValueError: the data differ.
    """
    if jax.process_count() > 1 and not same_on_all_hosts(streaming.digest(data)):
        raise ValueError(
            "`data` must hold the same examples in the same order on all hosts, got others on one "
            "of them. List files in one order, e.g. with `sorted()`."
        )


def same_on_all_hosts(text: str) -> bool:
    """Returns whether all hosts call this with the same text."""
    if jax.process_count() == 1:
        return True
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    return bool(np.all(multihost_utils.process_allgather(digest) == digest))


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


def shared_bytes(number: int) -> bytes:
    """Draws a multiple of four random bytes, equal on all hosts."""
    drawn = secrets.token_bytes(number)
    if jax.process_count() == 1:
        return drawn
    words = multihost_utils.broadcast_one_to_all(np.frombuffer(drawn, np.uint32))
    return np.asarray(words).tobytes()
