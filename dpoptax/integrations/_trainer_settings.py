"""Checks the settings of a Kauldron trainer before a private run."""

import math
from collections.abc import Collection
from typing import Any

import jax
from jax.sharding import NamedSharding
from kauldron import kd

import dpoptax
from dpoptax.integrations import _run
from dpoptax.integrations._plan_pipeline import PlanPipeline


def check(
    trainer: kd.train.Trainer, plan: dpoptax.PrivacyPlan, public_evals: Collection[str]
) -> None:
    """Raises an error unless the settings of a trainer allow a private run."""
    _run.run_plan(plan, trainer.workdir)
    batches = trainer.train_ds
    _run.check_batches(batches.data if isinstance(batches, PlanPipeline) else batches, plan)
    if trainer.num_train_steps is not None:
        stops = [trainer.num_train_steps + 1, trainer.stop_after_steps]
        made = min(steps for steps in stops if steps is not None)
        _run.check_max_steps("num_train_steps + 1", made, plan)
    _check_evals(trainer, public_evals)
    if trainer.checkify_error_categories:
        raise ValueError(
            "`checkify_error_categories` must be empty, because errors would depend on private "
            f"values, got {set(trainer.checkify_error_categories)}."
        )
    mesh, axes = batch_axes(trainer.sharding.batch)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    if plan.sampler.padded_size % devices:
        raise ValueError(
            f"The {devices} devices must share each batch evenly, got {plan.sampler.padded_size} "
            f"rows with padding. Make the plan's sampler with multiple_of={devices}."
        )


def batch_axes(
    sharding: object,
) -> tuple[jax.sharding.Mesh | jax.sharding.AbstractMesh, tuple[str, ...]]:
    """Returns the mesh of a batch, and the axes of more than one device that share its rows."""
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            f"`sharding.batch` must be one `jax.sharding.NamedSharding`, got {sharding!r}."
        )
    first = sharding.spec[0] if sharding.spec else None
    axes = (first,) if isinstance(first, str) else first or ()
    return sharding.mesh, tuple(axis for axis in axes if sharding.mesh.shape[axis] > 1)


def _check_evals(trainer: kd.train.Trainer, public_evals: Collection[str]) -> None:
    if isinstance(public_evals, str):
        raise TypeError(f"`public_evals` must be a list of names, got {public_evals!r}.")
    for name, evaluator in trainer.evals.items():
        if name not in public_evals:
            raise ValueError(
                "`evals` must be on public data, because their losses are written without noise, "
                f"got {name!r}. If its data are public, pass "
                f"`PrivateTrainStep(public_evals=[{name!r}])`."
            )
        fields = vars(evaluator.update_from_root_cfg(trainer)).values()
        if any(map(_reads_plan, fields)):
            raise ValueError(f"`evals` must be on public data, got {name!r} on the plan's batches.")
    if _reads_plan(trainer.eval_ds):
        raise ValueError("`eval_ds` must hold public data, got the plan's batches.")


def _reads_plan(data: Any) -> bool:
    while data is not None and not isinstance(data, PlanPipeline):
        data = getattr(data, "parent", None)
    return data is not None
