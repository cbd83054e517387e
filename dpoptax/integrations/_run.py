"""Checks a private run inside another library's trainer: its chain, plan, step and folder."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

import dpoptax
from dpoptax.users import UserTable

NOT_SHOWN = (
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

    def __iter__(self) -> Iterator[dpoptax.Batch]:
        raise TypeError(
            "`plan_batches` must be given to a `PrivateTrainer`, which reads each batch once, "
            "also after a restart. In your own loop, write `plan.batches(rows)`."
        )


def plan_batches(
    plan: dpoptax.PrivacyPlan, rows: Any, *, users: UserTable | None = None
) -> PlanBatches:
    """Returns the training data of a `PrivateTrainer`.

    The trainer reads the batch of each step when it needs it, and starts at its own step. So a
    restored run reads no batch of a finished step.

    Args:
      plan: the trainer's plan.
      rows: a tree of arrays with N rows each, as for `PrivacyPlan.batches`. A trainer that goes on
        after a restart must get the same rows in the same order.
      users: the table of owners that made the plan's sampler, if the plan draws users.
    """
    return PlanBatches(plan, rows, users)


def run_plan(plan: dpoptax.PrivacyPlan, folder: object) -> dpoptax.PrivacyPlan:
    """Returns the plan of one run, with a seed. `folder` holds its checkpoints, if any.

    Raises:
      ValueError: several processes take part, or the run can be restored but the plan has no seed.
    """
    if not isinstance(plan, dpoptax.PrivacyPlan):
        raise TypeError(f"`plan` must be a `dpoptax.PrivacyPlan`, got {plan!r}.")
    if jax.process_count() > 1:
        raise ValueError(f"`PrivateTrainer` needs one process, got {jax.process_count()}.")
    if plan.sampler.seed is not None:
        return plan
    if folder is not None:
        raise ValueError(
            "`plan` must have a seed in a run with checkpoints, because no checkpoint contains it. "
            "Pass `plan = plan.new_run()`, and keep the plan as secret as the data."
        )
    return plan.new_run()


def check_chain(
    opt_state: Any,
    plan: dpoptax.PrivacyPlan,
    clip: dpoptax.Clip | float,
    selection: str = "freeze the others in the model",
) -> None:
    """Raises an error unless the chain starts with the plan's noise.

    `selection` tells how to train some of the parameters.
    """
    stages = _noise_stages(opt_state)
    remedy = "Pass `optax.chain(plan.noise(key), …)`."
    if len(stages) != 1:
        raise ValueError(f"`optimizer` must have one noise stage, got {len(stages)}. {remedy}")
    ((path, _),) = stages
    if any(map(_noise_stages, _multi_steps(opt_state))):
        raise ValueError(
            "`optax.MultiSteps` must not hold the noise stage, because it would add up clipped sums"
            " that have no noise yet. To save memory, pass `microbatch_size`."
        )
    place = f"opt_state{jax.tree_util.keystr(path)}"
    made = plan.noise(jax.random.key(0), clip=clip).init(jnp.zeros(1))
    ((own_path, _),) = _noise_stages(made)  # in the state of the plan's transform
    if own_path and path[-len(own_path) :] == own_path:
        path = path[: -len(own_path)]
    if not all(isinstance(entry, jax.tree_util.SequenceKey) for entry in path):
        raise ValueError(
            "The noise stage must be the first transform of an `optax.chain`, got it inside of "
            f"another transform at {place}. A transform around it, such as `optax.masked`, would "
            "change the private sum, and the names of a named chain do not tell its order. "
            f"{remedy} To train some of the parameters only, {selection}."
        )
    if any(entry.idx != 0 for entry in path):
        raise ValueError(
            f"The noise stage must be the first transform of `optimizer`, got it at {place}. A "
            "transform in front, such as `optax.clip_by_global_norm`, would change the private sum "
            "and void its bound. Remove it: each example is clipped already, by `clip`."
        )
    (planned,), (found,) = dpoptax.ledgers(made), dpoptax.ledgers(opt_state)
    if planned.mechanism != found.mechanism:
        raise ValueError(
            f"The noise of `optimizer` must be the plan's, {planned.mechanism}, got "
            f"{found.mechanism}. {remedy}"
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


def check_accumulation(name: str, steps: int | None) -> None:
    """Raises an error if a setting of the trainer splits batches over several steps."""
    if steps is not None:
        raise ValueError(
            f"`{name}` must be None, got {steps}: each part of a batch would be a release with its "
            "own noise and cost. To save memory, pass `microbatch_size`."
        )


def check_max_steps(name: str, steps: int | None, plan: dpoptax.PrivacyPlan) -> None:
    """Raises an error if a setting of the trainer asks for more steps than the plan has."""
    if steps is not None and steps > plan.steps:
        raise ValueError(
            f"`{name}` must be at most the plan's {plan.steps} steps, got {steps}. Make a plan with"
            f" steps={steps}: each step costs privacy."
        )


def check_batches(batches: object, plan: dpoptax.PrivacyPlan) -> PlanBatches:
    """Returns training data, or raises an error unless they are drawn by the trainer's plan."""
    if not isinstance(batches, PlanBatches):
        raise TypeError(
            "`train_ds` must be `plan_batches(plan, rows)`, because ε holds for random batches of "
            f"the plan, got a {type(batches).__name__}."
        )
    if batches.plan is not plan:
        raise ValueError("`train_ds` must be made with the plan of the trainer, got another plan.")
    return batches


def check_folder(
    folder: str | epath.Path | None, plan: dpoptax.PrivacyPlan, opt_state: Any, step: int
) -> None:
    """Raises an error if a folder of checkpoints belongs to a run with other draws or noise.

    The first start of a run writes its sampler and fingerprints of its seed and noise key to the
    folder. The guarantee covers the steps before a restart by the sampler of the last start.
    """
    if folder is None:
        return
    event = plan.guarantee(opt_state).event
    # The padding may follow the number of devices. A sampler shows no seed.
    sampler = repr(dataclasses.replace(plan.sampler, multiple_of=1))
    own = {
        "seed": sorted(event.seeds),
        "key": sorted(event.keys),
        "sampler": hashlib.sha256(sampler.encode()).hexdigest(),
    }
    record = epath.Path(folder) / _RECORD
    if not record.exists():
        if step:
            raise ValueError(
                f"The folder {folder} must hold a private run, got step {step} without {_RECORD}."
            )
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(own))
    found = json.loads(record.read_text())
    other = [name for name in own if own[name] != found.get(name)]
    if other:
        raise ValueError(
            f"The folder {folder} holds a run with another {' and '.join(other)}. A step that is "
            "repeated must have the same batch and the same noise. Continue with the plan and key "
            "of the run, or use another folder."
        )


def noise_key_words(opt_state: Any) -> bytes:
    """Returns the bits of the noise key, which are secret."""
    ((_, stage),) = _noise_stages(opt_state)
    key = jnp.asarray(stage.key)
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(key) if typed else key).tobytes()


def step_key(secret: bytes, step: int) -> jax.Array:
    """Returns the key of a loss with randomness in a step, a hash of the bits of the noise key."""
    derived = hashlib.shake_256(secret + f"loss of step {step}".encode()).digest(8)
    words = jnp.asarray(np.frombuffer(derived, np.uint32))
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def specs_of(params: Any) -> Any:
    """Returns how each parameter is sharded."""

    def spec(x: jax.Array) -> PartitionSpec:
        return x.sharding.spec if isinstance(x.sharding, NamedSharding) else PartitionSpec()

    return jax.tree.map(spec, params)


def _noise_stages(opt_state: Any) -> list[tuple[Any, Any]]:
    """Returns paths and states of the noise stages."""
    is_stage = lambda x: hasattr(x, "mechanism")  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_stage)
    return [(path, leaf) for path, leaf in leaves if is_stage(leaf)]


def _multi_steps(opt_state: Any) -> list[Any]:
    """Returns the states of `optax.MultiSteps`."""
    is_state = lambda x: isinstance(x, optax.MultiStepsState)  # noqa: E731
    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_state) if is_state(x)]
