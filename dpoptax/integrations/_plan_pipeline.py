"""Feeds the batches of a plan to a Kauldron trainer."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import enp
from kauldron import kd
from kauldron.data import iterators

import dpoptax
from dpoptax.integrations import _run
from dpoptax.users import UserTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanBatch:
    """Holds the batch of a step, and as static data its number."""

    examples: Any
    mask: Any
    ids: Any
    step: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlanIterator(iterators.Iterator):
    """Reads the plan's batches. Checkpoints hold the number of the next one."""

    source: "PlanPipeline"
    progress: dict[str, int] = dataclasses.field(default_factory=lambda: {"step": 0})

    @functools.cached_property
    def _batches(self) -> Iterator[dpoptax.Batch]:
        data = self.source.data
        return data.plan.batches(data.rows, start=self.progress["step"], users=data.users)

    def __next__(self) -> PlanBatch:
        batch = next(self._batches)
        self.progress["step"] = batch.step + 1
        return PlanBatch(batch.examples, batch.mask, batch.ids, batch.step)

    def __kd_ocp_handlers__(self) -> ocp.CheckpointHandler:
        return ocp.JsonCheckpointHandler()

    def __kd_ocp_save_args__(self) -> ocp.args.CheckpointArgs:
        return ocp.args.JsonSave(dict(self.progress))

    def __kd_ocp_restore_args__(self) -> ocp.args.CheckpointArgs:
        return ocp.args.JsonRestore()

    def __kd_ocp_restore_post__(self, value: dict[str, int]) -> "_PlanIterator":
        return dataclasses.replace(self, progress=value)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanPipeline(kd.data.Pipeline):
    """Reads the batches that a plan draws. `plan_batches` makes it."""

    data: _run.PlanBatches

    def __iter__(self) -> _PlanIterator:
        return _PlanIterator(source=self)

    def __len__(self) -> int:
        return self.data.plan.steps

    @functools.cached_property
    def element_spec(self) -> Any:
        """Returns shapes and types of a batch of rows, without reading one."""
        size = self.data.plan.sampler.padded_size
        return jax.tree.map(
            lambda x: enp.ArraySpec((size, *x.shape[1:]), np.dtype(x.dtype)), self.data.rows
        )


def plan_batches(
    plan: dpoptax.PrivacyPlan, rows: Any, *, users: UserTable | None = None
) -> PlanPipeline:
    """Returns the `train_ds` of a trainer with a `PrivateTrainStep`.

    The trainer reads the batch of each step when it needs it. A restored run goes on at its step,
    and reads no batch of a finished step.

    Args:
      plan: the plan of the step.
      rows: a tree of arrays with N rows each, as for `PrivacyPlan.batches`, usually a dictionary. A
        run that goes on after a restart must get the same rows in the same order.
      users: the table of owners that made the plan's sampler, if the plan draws users.
    """
    return PlanPipeline(
        data=_run.PlanBatches(plan, rows, users), batch_size=plan.sampler.batch_size, seed=None
    )
