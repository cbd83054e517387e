"""Checks the arguments of the function that `clipped_grad` returns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dpoptax._gradients.points import GradientPoints
from dpoptax._support.tree import PyTree
from dpoptax._support.xla import out_sharding


def check_ids(ids: ArrayLike | None, key: jax.Array | None, batch_size: int) -> jax.Array | None:
    """Returns the records' numbers as an array, or raises if they do not fit the key and batch."""
    if (ids is None) != (key is None):
        given, missing = ("key", "ids") if ids is None else ("ids", "key")
        raise ValueError(
            f"`{missing}` must be given with `{given}`. Each example gets the key "
            "fold_in(key, id), so that records do not change each other's randomness. Pass "
            "`key=key, ids=indices` with the sampler's indices. Pass `ids=jnp.arange(B)` only if "
            "row i of every batch is record i."
        )
    if ids is None:
        return None
    ids = jnp.asarray(ids)
    if ids.shape != (batch_size,) or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"`ids` must be integers of shape ({batch_size},), the index of each example's record, "
            f"got {ids.dtype}{list(ids.shape)}."
        )
    return ids


def check_one_device(batch: PyTree) -> None:
    """Raises an error if the examples are sharded although no mesh was given."""
    for leaf in jax.tree.leaves(batch):
        if sharding := _known_sharding(leaf):
            raise ValueError(
                f"A sharded batch needs a mesh, got a batch sharded by {sharding}. Call "
                "`dpoptax.clipped_grad(..., mesh=mesh, axis_name=...)`. Without a mesh the "
                "compiler shards the work, and its per-example gradients of convolutions are wrong."
            )


def _known_sharding(x: jax.Array) -> jax.sharding.Sharding | None:
    """Returns the sharding of an array; `None` if it is whole, or its type does not tell."""
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return None if x.sharding.is_fully_replicated else x.sharding
    return out_sharding(x)


def check_same_axes(points: GradientPoints, batch: PyTree) -> None:
    """Raises an error if a parameter in `shard_map` does not vary like the examples.

    The derivative with respect to this parameter would be the sum over devices; see
    `sum_over_devices`.
    """
    batch_axes = frozenset().union(*map(_varying, jax.tree.leaves(batch)))
    for point in points.points if batch_axes else ():
        _check_varying(point, batch_axes)


def _check_varying(params: PyTree, batch_axes: frozenset[str]) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if missing := batch_axes - _varying(leaf):
            name = jax.tree_util.keystr(path) or "the parameter"
            raise ValueError(
                f"Inside `jax.shard_map`, the batch varies over {sorted(missing)}, but {name} does "
                "not. Its derivative is the sum over devices before the clip, which would bound "
                "sums of several examples. Call `dpoptax.clipped_grad(..., mesh=mesh, "
                "axis_name=...)` outside `jax.shard_map` instead."
            )


def _varying(x: jax.Array) -> frozenset[str]:
    """Returns the manual axes that an array varies over, if `shard_map` tracks them."""
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying
