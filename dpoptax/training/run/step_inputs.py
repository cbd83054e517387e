"""Describes the arrays that a compiled step gets."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax.training import hosts
from dpoptax.users import UserTable


class Inputs(NamedTuple):
    """Holds the arrays that a compiled step gets. Losses without randomness get no ids and key.

    Attributes:
        examples: Leaves (B, ...); for users, the pair of leaves (B, R, ...) and the mask (B, R) of
            their records.
        mask: False for padding, (B,).
        ids: Numbers of the records or users, (B,).
        key: The key of the step.
    """

    examples: Any
    mask: Any
    ids: Any = None
    key: Any = None


def inputs_of(
    step: int,
    examples: Any,
    mask: Any,
    ids: Any,
    secret: jax.Array | None,
    sharding: NamedSharding | None,
) -> Inputs:
    """Returns the inputs of a step from its batch.

    `secret` is the key of losses with randomness, and `sharding` that of the batch.
    """
    if secret is None:
        return Inputs(examples, mask)
    key = jax.random.fold_in(secret, step)
    if sharding is not None:
        key = hosts.place(key, NamedSharding(sharding.mesh, P()))
    return Inputs(examples, mask, ids, key)


def input_shapes(columns: Any, size: int, users: UserTable | None, *, random: bool) -> Inputs:
    """Returns the shapes and types of inputs with `size` drawn records or users.

    `columns` are those of the data, or their shapes, and `random` is whether the loss gets a key.
    """
    lead = (size,) if users is None else (size, users.records_per_user)

    def drawn(shape: tuple[int, ...], kind: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(kind))

    examples = jax.tree.map(lambda x: drawn((*lead, *x.shape[1:]), x.dtype), columns)
    if users is not None:
        examples = examples, drawn(lead, np.bool_)
    inputs = Inputs(examples, drawn((size,), np.bool_))
    if not random:
        return inputs
    key = jax.eval_shape(jax.random.key, 0)
    return inputs._replace(ids=drawn((size,), np.int64), key=key)
