"""The batches of a run, from the sampler's draws to the device."""

from typing import Any

import numpy as np

from dpoptax.training.data import streaming
from dpoptax.training.data.dataset import Dataset
from dpoptax.training.run import devices
from dpoptax.training.run.resolved import Run
from dpoptax.training.run.step import Loaded, Resident


class Feed:
    """Batch and mask of each step, from the training split on the device or from where it is.

    Attributes:
        splits: What evaluations read, on the device, or where it is if it is streamed.
    """

    def __init__(self, run: Run, dataset: Dataset, place: devices.Devices) -> None:
        self._sampler, self._source, self._place = run.plan.sampler, dataset.train, place
        self._resident = place.mesh is None and streaming.in_memory(dataset.train)
        self.splits: dict[str, Any] = {"test": dataset.test}
        if streaming.in_memory(dataset.test):
            self.splits["test"] = place.replicate(dataset.test)
        if self._resident or run.config.record_training_metrics:
            self.splits["train"] = place.replicate(dataset.train)

    def __call__(self, step: int) -> tuple[Any, Any]:
        sample = self._sampler.sample(step)
        if self._resident:
            return Resident(self.splits["train"], sample.indices.astype(np.int32)), sample.mask
        batch, mask = streaming.load_batch(self._source, sample, self._place.rows)
        return Loaded(batch, streaming.load_indices(sample, self._place.rows)), mask
