"""Feeds the batches that a sampler draws to the device."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpoptax.runs import draw, read_batch
from dpoptax.sampling import Sampler
from dpoptax.training.data import streaming
from dpoptax.users import UserTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fed:
    """The batch of a step: its examples, or their rows in data on the device.

    Attributes:
        source: Leaves (B, ...), for users (B, R, ...) with the mask of rows; with `rows`, the data.
        indices: Indices of the records or users, int32, (B,).
        rows: Indices into the data, int32, (B,), or (B, R) for users. None: `source` is the batch.
        rows_mask: With `rows`, the mask of the rows of users, (B, R). None for records.
    """

    source: Any
    indices: Any
    rows: Any = None
    rows_mask: Any = None

    def examples(self) -> Any:
        """Returns leaves (B, ...), or for users (B, R, ...) with the mask of rows."""
        if self.rows is None:
            return self.source
        found = jax.tree.map(lambda values: values[self.rows], self.source)
        return found if self.rows_mask is None else (found, self.rows_mask)


def batch_shapes(columns: Any, size: int, users: UserTable | None) -> Any:
    """Returns shapes and types of `size` drawn records or users, from columns or their shapes."""
    lead = (size,) if users is None else (size, users.records_per_user)

    def drawn(x: Any) -> jax.ShapeDtypeStruct:
        kind = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct((*lead, *x.shape[1:]), kind)

    batch = jax.tree.map(drawn, columns)
    return batch if users is None else (batch, jax.ShapeDtypeStruct(lead, np.bool_))


def feed(
    sampler: Sampler, source: streaming.Source, mesh: Mesh | None, users: UserTable | None
) -> Callable[[int], tuple[Fed, Any]]:
    """Returns a function from a step to its batch and mask.

    Args:
        sampler: Draws the records, or the users.
        source: The records. If all columns are arrays on the only device, the compiled step
            gathers the rows.
        mesh: Devices along an axis "data" that share each batch. None: one device.
        users: The records of each user. None: the sampler draws records.
    """
    on_device = all(isinstance(x, jax.Array) for x in streaming.columns(source))
    sharding = None if mesh is None else NamedSharding(mesh, P("data"))

    def load(step: int) -> tuple[Fed, Any]:
        rows, mask, ids, known = draw(sampler, users, step)
        ids = ids.astype(np.int32)
        if on_device and mesh is None:
            return Fed(source, ids, rows.astype(np.int32), known), mask
        read = functools.partial(streaming.read, source)
        batch, mask, ids = read_batch(read, (rows, mask, ids, known), sharding)
        return Fed(batch, ids), mask

    return load
