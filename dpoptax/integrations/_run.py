"""Checks a private run inside another library's trainer, and takes its steps."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from absl import logging
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import dpoptax
from dpoptax.training import hosts
from dpoptax.training.run import resume, seeds
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


class Inputs(NamedTuple):
    """Holds the arrays that a compiled step gets. Losses without randomness get no key."""

    examples: Any
    mask: Any
    ids: Any = None
    key: jax.Array | None = None


def step_inputs(
    data: PlanBatches, opt_state: Any, step: int, rows: NamedSharding | None, *, random: bool = True
) -> Iterator[Inputs]:
    """Yields the inputs of a run's steps from a step on. It reads no batch of earlier steps.

    `rows` is how a batch is split over devices, and `random` whether the loss gets a key.
    """
    logging.info(_NOT_SHOWN)
    secret = _loss_key(opt_state)
    del opt_state  # frees it during the run
    for batch in data.plan.batches(data.rows, start=step, users=data.users, sharding=rows):
        inputs = Inputs(batch.examples, batch.mask)
        if random:
            key = jax.random.fold_in(secret, batch.step)
            if rows is not None:
                key = hosts.place(key, NamedSharding(rows.mesh, PartitionSpec()))
            inputs = inputs._replace(ids=batch.ids, key=key)
        yield inputs


def _loss_key(opt_state: Any) -> jax.Array:
    """Derives the key of losses with randomness from the noise key."""
    is_stage = lambda x: hasattr(x, "mechanism")  # noqa: E731
    stages = filter(is_stage, jax.tree.leaves(opt_state, is_leaf=is_stage))
    return seeds.random_key(next(stages).key)


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


def specs_of(params: Any) -> Any:
    """Returns how each parameter is sharded."""

    def spec(x: jax.Array) -> PartitionSpec:
        return x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()

    return jax.tree.map(spec, params)


def check_plan(plan: dpoptax.PrivacyPlan) -> None:
    """Raises an error unless the plan is that of one run."""
    if not isinstance(plan, dpoptax.PrivacyPlan):
        raise TypeError(f"`plan` must be a `dpoptax.PrivacyPlan`, got {plan!r}.")
    if plan.sampler.seed is None:
        raise ValueError(
            "`plan` must have a seed, because no checkpoint contains it. Pass "
            "`plan = plan.new_run()`, and keep the plan as secret as the data."
        )


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
    if batches.plan is not plan:
        raise ValueError("`train_ds` must be made with the plan of the trainer, got another plan.")
    if steps is not None and steps > plan.steps:
        raise ValueError(
            f"`{name}` must be at most the plan's {plan.steps} steps, got {steps}. Make a plan with"
            f" steps={steps}: each step costs privacy."
        )
    return batches


def check_state(
    opt_state: Any,
    step: int,
    plan: dpoptax.PrivacyPlan,
    clip: dpoptax.Clip | float,
    folder: str | epath.Path | None,
) -> None:
    """Raises an error unless a state is that of a run of the plan after a number of steps.

    `folder` is that of its checkpoints, if any.
    """
    _check_chain(opt_state, plan, clip)
    check_step(opt_state, step)
    _check_folder(folder, plan, opt_state, step)


def _check_chain(opt_state: Any, plan: dpoptax.PrivacyPlan, clip: dpoptax.Clip | float) -> None:
    """Raises an error unless the chain starts with the plan's noise."""
    planned = plan.noise(jax.random.key(0), clip=clip).init(jnp.zeros(1))
    found, remedy = dpoptax.ledgers(opt_state), "Pass `optax.chain(plan.noise(key), …)`."
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


def check_hosts(data: PlanBatches, opt_state: Any) -> None:
    """Raises an error on all hosts unless they have the same data, sampler, seed and noise key."""
    resume.check_same_on_hosts(_identity(data.plan, opt_state), data.rows, data.users)


def _identity(plan: dpoptax.PrivacyPlan, opt_state: Any) -> dict[str, Any]:
    """Returns fingerprints of a run's seed, noise key and sampler."""
    event = plan.guarantee(opt_state).event
    # The padding may follow the number of devices. A sampler shows no seed.
    sampler = repr(dataclasses.replace(plan.sampler, multiple_of=1))
    return {
        "seed": sorted(event.seeds),
        "key": sorted(event.keys),
        "sampler": hashlib.sha256(sampler.encode()).hexdigest(),
    }


def _check_folder(
    folder: str | epath.Path | None, plan: dpoptax.PrivacyPlan, opt_state: Any, step: int
) -> None:
    """Raises an error if earlier steps may belong to a run with other draws or noise.

    The first start of a run writes its sampler and fingerprints of its seed and noise key to its
    folder. The guarantee covers the steps before a restart by the sampler of the last start.
    """
    record = None if folder is None else epath.Path(folder) / _RECORD
    if step and not (record and record.exists()):
        raise ValueError(
            f"A run must start at step 0, or go on in its own folder, got step {step}, and no "
            f"{_RECORD} in the folder {folder}."
        )
    if record is None:
        return
    own = _identity(plan, opt_state)
    if jax.process_index() == 0 and not record.exists():
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(own))
    hosts.same_on_all_hosts(_RECORD)  # waits for the file
    found = json.loads(record.read_text())
    other = [name for name in own if own[name] != found.get(name)]
    if other:
        raise ValueError(
            f"The folder {folder} holds a run with another {' and '.join(other)}. A step that is "
            "repeated must have the same batch and the same noise. Continue with the plan and key "
            "of the run, or use another folder."
        )
