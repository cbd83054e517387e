"""Checks a private run inside another library's trainer, and takes its steps."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from absl import logging
from etils import epath
from jax.sharding import NamedSharding

import dpoptax
from dpoptax.runs import (
    Hidden,
    RunIdentity,
    data_of,
    differing,
    digest_of,
    draws_of,
    noise_key_of,
    noise_of,
    noise_stage,
    sampler_of_run,
    settings,
    traced,
    tree_digest,
)
from dpoptax.training.run import seeds
from dpoptax.training.run.step_inputs import Inputs as Inputs
from dpoptax.training.run.step_inputs import input_shapes, inputs_of
from dpoptax.users import UserTable, per_user_loss

_NOT_SHOWN = (
    "Losses, metrics and gradient norms of private batches are not shown: they have no noise, and "
    "the guarantee does not cover them."
)
_RECORD = "dpoptax_run.json"


@dataclasses.dataclass(frozen=True)
class PlanBatches:
    """Holds the rows that a plan draws its batches from. `plan_batches` makes it."""

    plan: dpoptax.PrivacyPlan
    rows: Any = dataclasses.field(repr=False)
    users: UserTable | None = None


def step_inputs(
    data: PlanBatches, opt_state: Any, rows: NamedSharding | None, *, random: bool = True
) -> Iterator[Inputs]:
    """Yields the inputs of the remaining steps of a state's run. It reads no earlier batch.

    `rows` is how a batch is split over devices, and `random` whether the loss gets a key.
    """
    logging.info(_NOT_SHOWN)
    secret = seeds.random_key(noise_key_of(opt_state)) if random else None
    run = data.plan.continue_run(opt_state)
    del opt_state  # frees it during the run
    for batch in run.batches(data.rows, users=data.users, sharding=rows):
        yield inputs_of(*batch, secret, rows)


def update(
    loss_fn: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
    opt_state: Any,
    params: Any,
    inputs: Inputs,
    *,
    plan: dpoptax.PrivacyPlan,
    clip: dpoptax.Clip | float,
    rows: NamedSharding | None,
    specs: Any,
    **options: Any,
) -> tuple[Any, Any]:
    """Returns the parameters and the optimizer's state after a private step.

    `loss_fn` is the loss of one record. `rows` and `specs` are how the batch and the parameters are
    split over devices. `options` are further arguments of `clipped_grad`.
    """
    if plan.sampler.unit == "user":
        loss_fn = per_user_loss(loss_fn)
    if rows is not None and rows.mesh.size > 1 and rows.spec and rows.spec[0]:
        options |= {"mesh": rows.mesh, "axis_name": rows.spec[0], "param_specs": specs}
    grad_fn = dpoptax.clipped_grad(loss_fn, clip, grid=plan.grid(clip), **options)
    points = dpoptax.gradient_points(opt_state, params)
    total = grad_fn(points, inputs.examples, inputs.mask, key=inputs.key, ids=inputs.ids)
    updates, opt_state = tx.update(total, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def check_plan(plan: dpoptax.PrivacyPlan) -> None:
    """Raises an error unless `plan` is a plan."""
    if not isinstance(plan, dpoptax.PrivacyPlan):
        raise TypeError(f"`plan` must be a `dpoptax.PrivacyPlan`, got {plan!r}.")


def check_data(
    batches: object, plan: dpoptax.PrivacyPlan, name: str, steps: int | None
) -> PlanBatches:
    """Returns training data, or raises an error unless they are batches of the trainer's plan.

    `steps` is the number of steps that the trainer's setting `name` asks for.
    """
    if not isinstance(batches, PlanBatches):
        raise TypeError(
            "`train_ds` must be `plan_batches(plan, rows)`, because ε holds for random batches of "
            f"the plan, got a {type(batches).__name__}."
        )
    if batches.plan != plan:
        raise ValueError("`train_ds` must be made with the plan of the trainer, got another plan.")
    if steps is not None and steps > plan.steps:
        raise ValueError(
            f"`{name}` must be at most the plan's {plan.steps} steps, got {steps}. Make a plan with"
            f" steps={steps}: each step costs privacy."
        )
    return batches


def check_state(
    opt_state: Any, step: int, plan: dpoptax.PrivacyPlan, clip: dpoptax.Clip | float
) -> None:
    """Raises an error unless a state is that of a run of the plan after a number of steps.

    Its chain must start with the plan's noise.
    """
    planned = noise_stage(plan, jax.random.key(0), clip).init(jnp.zeros(1))
    found, remedy = dpoptax.ledgers(opt_state), "Pass `optax.chain(plan.new_run().noise(), …)`."
    if len(found) != 1:
        raise ValueError(f"`optimizer` must have one noise stage, got {len(found)}. {remedy}")
    head = opt_state
    while type(head) is tuple and head:  # the state of an `optax.chain`
        head = head[0]
    if type(head) is not type(planned):
        raise ValueError(
            "The noise stage must be the first transform of an `optax.chain`, got a state that "
            f"starts with {type(head).__name__}. A transform in front of it, such as "
            "`optax.clip_by_global_norm`, or around it, such as `optax.masked` or "
            "`optax.MultiSteps` (`gradient_accumulation_steps`), would change the private sum. A "
            "named chain does not show its order. Examples are clipped already, by `clip`. To save "
            "memory, pass `microbatch_size`. To train some of the parameters, freeze the others in "
            "the model, or in Kauldron pass `PrivateTrainStep(trained=mask)`."
        )
    wanted = dpoptax.ledgers(planned)[0].mechanism
    if found[0].mechanism != wanted:
        raise ValueError(
            f"The noise of `optimizer` must be the plan's, {wanted}, got {found[0].mechanism}. "
            f"{remedy}"
        )
    check_step(opt_state, step)


def check_step(opt_state: Any, step: int) -> None:
    """Raises an error unless the ledger has counted the trainer's steps."""
    (ledger,) = dpoptax.ledgers(opt_state)
    if ledger.releases != step:
        raise ValueError(
            f"The ledger must have counted the {step} steps of the trainer, got "
            f"{ledger.releases} releases. Parameters were restored without their optimizer's "
            "state, or steps were taken without noise. Restore both from one checkpoint, or start "
            "a new run, and add the guarantee of the first part: `PrivacyPlan(also=[…])`."
        )


def program_of(
    step: Callable[..., Any], data: PlanBatches, *state: Any, random: bool = True
) -> Hidden:
    """Returns the digest of `step(*state, inputs)`, with every array that it closes over.

    It does not depend on the devices that share a batch, so that a run may go on on others.
    """
    inputs = input_shapes(data.rows, data.plan.sampler.padded_size, data.users, random=random)
    with warnings.catch_warnings():
        # Frozen weights are constants of this program, but arguments of the step that is compiled.
        warnings.filterwarnings("ignore", "`loss_fn` closes over")
        return Hidden(digest_of(traced(step, *state, inputs)))


def check_run(
    data: PlanBatches,
    opt_state: Any,
    params: Any,
    step: int,
    program: Hidden,
    folder: str | epath.Path | None,
) -> None:
    """Raises an error on all hosts unless they start or continue one run.

    The first start of a run writes its identity to its folder. A step that is repeated must have
    the same batch, the same program and the same noise.

    Args:
      data: the data.
      opt_state: the state before the step.
      params: the trained parameters before the step.
      step: the number of steps so far.
      program: from `program_of`.
      folder: that of the checkpoints, if any.
    """
    plan = data.plan
    first = {} if step else {"The initial parameters": Hidden(tree_digest(params))}
    identity = RunIdentity(
        {
            **settings(),
            **draws_of(sampler_of_run(plan, opt_state), data.users),
            **noise_of(plan, noise_key_of(opt_state)),
            **data_of(data.rows, whole=False),
            "The model, its loss or the optimizer": program,
            **first,
        }
    )
    if jax.process_count() > 1:
        identity.check_same_on_hosts(data.rows, step=step)
    _check_folder(folder, identity, step)


def _check_folder(folder: str | epath.Path | None, identity: RunIdentity, step: int) -> None:
    """Raises an error if earlier steps may belong to another run."""
    path = None if folder is None else epath.Path(folder) / _RECORD
    if step and not (path and path.exists()):
        raise ValueError(
            f"A run must start at step 0, or go on in its own folder, got step {step}, and no "
            f"{_RECORD} in the folder {folder}."
        )
    if path is None:
        return
    if jax.process_index() == 0 and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(identity.record()))
    differing({})  # waits for the file
    record = json.loads(path.read_text())
    identity.check_continues(record, f"the run in {folder}", part=step > 0)
