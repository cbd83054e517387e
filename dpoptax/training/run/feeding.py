"""Feeds the batches that a sampler draws to the device."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from dpoptax.runs import draw, read_batch
from dpoptax.sampling import Sampler
from dpoptax.training.data import streaming
from dpoptax.training.run import devices
from dpoptax.users import UserTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Resident:
    """A batch as row indices into a split on the device.

    Attributes:
        split: Leaves (N, ...).
        rows: Indices into the split, int32, (B,), or (B, R) for users.
        indices: Indices of the records or users, int32, (B,).
        rows_mask: Mask of the rows of users, (B, R). None for records.
    """

    split: Any
    rows: Any
    indices: Any
    rows_mask: Any = None

    def examples(self) -> Any:
        """Gathers leaves (B, ...), or for users (B, R, ...) with the mask of rows."""
        found = jax.tree.map(lambda values: values[self.rows], self.split)
        return found if self.rows_mask is None else (found, self.rows_mask)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Loaded:
    """A batch that was read for a step.

    Attributes:
        batch: Leaves (B, ...). For users, leaves (B, R, ...) and the mask of rows, (B, R).
        indices: Indices of the records or users, int32, (B,).
    """

    batch: Any
    indices: Any

    def examples(self) -> Any:
        """Returns the batch."""
        return self.batch


class Feed:
    """Returns the batch and the mask of each step.

    Args:
        sampler: Draws the records, or the users.
        source: The records. If all columns are arrays on the only device, the compiled step
            gathers the rows.
        place: The devices.
        users: The records of each user. None: the sampler draws records.
    """

    def __init__(
        self,
        sampler: Sampler,
        source: streaming.Source,
        place: devices.Devices,
        users: UserTable | None = None,
    ) -> None:
        self._sampler, self._source, self._place = sampler, source, place
        self._users = users
        columns = streaming.columns(source)
        self._resident = place.mesh is None and all(isinstance(x, jax.Array) for x in columns)

    def __call__(self, step: int) -> tuple[Any, Any]:
        rows, mask, ids, known = draw(self._sampler, self._users, step)
        ids = ids.astype(np.int32)
        if self._resident:
            return Resident(self._source, rows.astype(np.int32), ids, known), mask
        read = functools.partial(streaming.read, self._source)
        batch, mask, ids = read_batch(read, (rows, mask, ids, known), self._place.rows)
        return Loaded(batch, ids), mask
