"""The batches of a run, from the sampler's draws to the device."""

from typing import Any

import numpy as np

from dpoptax.sampling import Sample, Sampler
from dpoptax.training.data import streaming
from dpoptax.training.run import devices
from dpoptax.training.run.step import Loaded, Resident
from dpoptax.users import UserTable


class Feed:
    """Batch and mask of each step.

    Args:
        sampler: Draws the records, or the users.
        source: The records, on the device if `resident`.
        place: The devices.
        resident: Whether the step gathers its records from a source on the device.
        users: The records of each user. None: the sampler draws records.
    """

    def __init__(
        self,
        sampler: Sampler,
        source: streaming.Source,
        place: devices.Devices,
        *,
        resident: bool = False,
        users: UserTable | None = None,
    ) -> None:
        self._sampler, self._source, self._place = sampler, source, place
        self._resident, self._users = resident, users

    def __call__(self, step: int) -> tuple[Any, Any]:
        rows_mask = None
        if self._users is None:
            rows, mask = self._sampler.sample(step)
            indices = rows
        else:
            indices, mask, rows, rows_mask = self._users.sample(self._sampler, step)
        indices = indices.astype(np.int32)
        if self._resident:
            return Resident(self._source, rows.astype(np.int32), indices, rows_mask), mask
        batch, mask = streaming.load_batch(self._source, Sample(rows, mask), self._place.rows)
        if rows_mask is not None:
            batch = batch, self._rows(rows_mask)
        return Loaded(batch, self._rows(indices)), mask

    def _rows(self, rows: np.ndarray) -> Any:
        return streaming.load_rows(rows, self._place.rows)
