"""Describes a plan's batches to a Kauldron trainer, and checks the trainer's settings."""

import dataclasses
import functools
import itertools
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from etils import enp
from jax.sharding import NamedSharding
from kauldron import kd
from kauldron.data import iterators

import dpoptax
from dpoptax.integrations import _run


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlanPipeline(kd.data.Pipeline):
    """Yields empty batches: `PrivateTrainStep` reads the batch of its state's step.

    So a restored run needs no saved position in the data, and no evaluator gets private rows.
    """

    data: _run.PlanBatches

    def __iter__(self) -> iterators.Iterator:
        return iterators.NonCheckpointableIterator(source=self, iter=itertools.repeat(()))

    def __len__(self) -> int:
        return self.data.plan.steps

    @functools.cached_property
    def element_spec(self) -> Any:
        """Returns shapes and types of a host's part of a batch, which its devices can share."""
        size = self.data.plan.sampler.padded_size
        size = -(-size // jax.device_count()) * jax.local_device_count()
        return jax.tree.map(
            lambda x: enp.ArraySpec((size, *x.shape[1:]), np.dtype(x.dtype)), self.data.rows
        )


def check(
    trainer: kd.train.Trainer, plan: dpoptax.PrivacyPlan, public_evals: Collection[str]
) -> _run.PlanBatches:
    """Returns the data of a trainer, or raises an error if a setting of it is not private."""
    _run.check_plan(plan)
    stops = [trainer.stop_after_steps]
    stops += [] if trainer.num_train_steps is None else [trainer.num_train_steps + 1]
    steps = min((stop for stop in stops if stop is not None), default=None)
    data = getattr(trainer.train_ds, "data", trainer.train_ds)
    data = _run.check_data(data, plan, "num_train_steps + 1", steps)
    if isinstance(public_evals, str):
        raise TypeError(f"`public_evals` must be a list of names, got {public_evals!r}.")
    for name in trainer.evals:
        if name not in public_evals:
            raise ValueError(
                "`evals` must be on public data, because their losses are written without noise, "
                f"got {name!r}. If its data are public, pass "
                f"`PrivateTrainStep(public_evals=[{name!r}])`."
            )
    if trainer.checkify_error_categories:
        raise ValueError(
            "`checkify_error_categories` must be empty, because errors would depend on private "
            f"values, got {set(trainer.checkify_error_categories)}."
        )
    if not isinstance(trainer.sharding.batch, NamedSharding):
        raise ValueError(
            "`sharding.batch` must be one `jax.sharding.NamedSharding`, got "
            f"{trainer.sharding.batch!r}."
        )
    return data
