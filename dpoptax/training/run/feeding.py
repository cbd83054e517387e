"""The batches of a run, from the sampler's draws to the device."""

from typing import Any

import numpy as np

from dpoptax.sampling import Sample
from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.run import devices, seeds
from dpoptax.training.run.resolved import ResolvedRun
from dpoptax.training.run.step import Loaded, Resident


class Feed:
    """Batch and mask of each step, from the training split on the device or from where it is.

    Attributes:
        splits: What evaluations read, on the device, or where it is if it is streamed.
    """

    def __init__(self, run: ResolvedRun, dataset: Dataset, place: devices.Devices) -> None:
        self._sampler, self._source, self._place = run.plan.sampler, dataset.train, place
        self._users = None
        if run.config.records_per_user is not None:
            seed = seeds.of_records(run.plan.seed, run.config.generator)
            self._users = dataset.users(run.config.records_per_user, seed=seed)
        self._resident = place.mesh is None and streaming.in_memory(dataset.train)
        self.splits: dict[str, Any] = {"test": dataset.test}
        if streaming.in_memory(dataset.test):
            self.splits["test"] = place.replicate(dataset.test)
        if self._resident or run.config.record_training_metrics:
            self.splits["train"] = place.replicate(dataset.train)

    def __call__(self, step: int) -> tuple[Any, Any]:
        rows_mask = None
        if self._users is None:
            rows, mask = self._sampler.sample(step)
            indices = rows
        else:
            indices, mask, rows, rows_mask = self._users.sample(self._sampler, step)
        indices = indices.astype(np.int32)
        if self._resident:
            split = self.splits["train"]
            return Resident(split, rows.astype(np.int32), indices, rows_mask), mask
        batch, mask = streaming.load_batch(self._source, Sample(rows, mask), self._place.rows)
        if rows_mask is not None:
            batch = batch, self._rows(rows_mask)
        return Loaded(batch, self._rows(indices)), mask

    def _rows(self, rows: np.ndarray) -> Any:
        return streaming.load_rows(rows, self._place.rows)
