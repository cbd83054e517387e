"""Private training with Kauldron: a `TrainStep` that adds noise.

    plan = dpoptax.PrivacyPlan(dataset_size=N, batch_size=B, steps=T, epsilon=3.0, delta=1e-6)
    plan = plan.new_run()
    trainer = kd.train.Trainer(
        train_ds=plan_batches(plan, rows),
        optimizer=optax.chain(plan.noise(key), optax.adam(1e-3)),
        trainstep=PrivateTrainStep(plan=plan),
        num_train_steps=T - 1,
        …,
    )
    state, _ = trainer.train()
    print(guarantee(trainer, state))

Written for kauldron 1.4.2 and 1.4.4. `docs/examples/fine-tune.md` has a complete example.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from flax import traverse_util
from kauldron import kd
from kauldron.train import train_step

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.integrations import _run, _trainer_settings
from dpoptax.integrations._plan_pipeline import PlanBatch
from dpoptax.integrations._plan_pipeline import plan_batches as plan_batches
from dpoptax.users import per_user_loss


class _Inputs(NamedTuple):
    """Holds the arrays that the compiled step gets."""

    examples: Any
    mask: jax.Array
    ids: jax.Array
    key: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrivateTrainStep(kd.train.TrainStep):
    """Trains parameters privately, all of them or the selected ones.

    It differs from `TrainStep` in its step, which clips the gradient of each example and adds the
    plan's noise. Losses, metrics and summaries of private batches are private: the trainer writes
    none of them. The losses get batches of one example, so no example affects the loss of another.

    Privacy: `guarantee(trainer, state)` covers the parameters of all steps. Checkpoints hold the
    noise key and must stay private. `export` writes files that may be published. A run that goes on
    after a crash repeats the steps after its last checkpoint with the same noise. It must have the
    same rows, losses and optimizer.

    Args:
      plan: its N is the number of rows, and it has a seed. Kauldron runs `num_train_steps` + 1
        steps, at most T.
      clip: the clip of each example's gradient, as for `clipped_grad`.
      trained: selects the trained parameters, such as `kd.optim.select("lora")`; all by default.
        The optimizer gets these parameters only.
      public_evals: the names of all evaluators of the trainer. Their data count as public: their
        losses, metrics and summaries are written without noise.
      microbatch_size: as for `clipped_grad`.
      method: as for `clipped_grad`.

    Raises:
      TypeError: `plan` or the trainer's `train_ds` has the wrong type.
      ValueError: a setting of the trainer, a checkpoint or an optimizer contradicts the guarantee.
        The message names it.
    """

    plan: dpoptax.PrivacyPlan
    clip: dpoptax.Clip | float = 1.0
    trained: Callable[[Any], Any] | None = None
    public_evals: Collection[str] = ()
    microbatch_size: int | None = None
    method: Literal["auto", "vmap", "recompute", "integers"] = "auto"
    # The folder of checkpoints, the last step and the bits of the noise key. Secret.
    _seen: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def update_from_root_cfg(self, root_cfg: kd.train.Trainer) -> "PrivateTrainStep":
        """Returns the step of a trainer, or raises an error if a setting of it is not private."""
        _trainer_settings.check(root_cfg, self.plan, self.public_evals)
        made = super().update_from_root_cfg(root_cfg)
        # Not `workdir` of the trainer: a checkpointer may have its own.
        made._seen["folder"] = getattr(root_cfg.checkpointer, "workdir", None)
        return made

    def init(self, *args: Any, **options: Any) -> kd.train.TrainState:
        """Returns the initial state. The arguments are those of `TrainStep.init`."""
        state = super().init(*args, **options)
        if state.collections:
            raise ValueError(
                f"`model` must have no variables except parameters, got {list(state.collections)}: "
                "statistics of a batch mix its examples. Use `nn.LayerNorm` or `nn.GroupNorm`."
            )
        if state.opt_state is not None and not isinstance(state.step, jax.core.Tracer):
            self._check_chain(state)
        return state

    def _init_optimizer(self, state: kd.train.TrainState) -> kd.train.TrainState:
        """Returns the state with that of the optimizer.

        Unlike Kauldron's, it is not compiled: the program, and a cache of programs on disk, would
        contain the noise key.
        """
        opt_state = self.optimizer.init(self._split(state.params)[0])
        if isinstance(state.step, jax.core.Tracer):  # Kauldron asks for shapes
            opt_state = jax.tree.map(jnp.zeros_like, opt_state)
        else:
            opt_state = jax.tree.map(_on_all_devices, opt_state)
        made = state.replace(opt_state=opt_state)
        return kd.sharding.with_sharding_constraint(made, self.sharding.state)

    def step(
        self, state: kd.train.TrainState, batch: PlanBatch, **options: Any
    ) -> tuple[kd.train.TrainState, kd.train.AuxiliariesState]:
        """Returns the state after a step. It returns no losses, metrics and summaries."""
        if not isinstance(batch, PlanBatch):
            raise TypeError(
                "`batch` must come from `plan_batches(plan, rows)`, because ε holds for random "
                f"batches of the plan, got a {type(batch).__name__}."
            )
        with jax.transfer_guard("allow"):
            # The check waits for the state, so it is made once for each run.
            if self._seen.get("next") != batch.step or self._seen["step"] is not state.step:
                self._start(state, batch.step)
            key = _on_all_devices(_run.step_key(self._seen["words"], batch.step))
        inputs = _Inputs(batch.examples, batch.mask, batch.ids, key)
        del options  # whatever is asked for, the same program returns nothing
        state, aux = super().step(
            state, inputs, return_losses=True, return_metrics=True, return_summaries=True
        )
        self._seen.update(next=batch.step + 1, step=state.step)
        return state, aux

    def _start(self, state: kd.train.TrainState, batch_step: int) -> None:
        """Checks the first step of a run, or of a restored run."""
        step = int(state.step)
        self._check_chain(state)
        _run.check_step(state.opt_state, step)
        if batch_step != step:
            raise ValueError(
                f"The batch of step {step} must be used in this step, got that of {batch_step}. Do "
                "not restore a step with `init_transform`, and iterate over `train_ds` once."
            )
        _run.check_folder(self._seen.get("folder"), self.plan, state.opt_state, step)
        logging.info(_run.NOT_SHOWN)
        self._seen["words"] = _run.noise_key_words(state.opt_state)

    def _check_chain(self, state: kd.train.TrainState) -> None:
        remedy = "pass `PrivateTrainStep(trained=mask)` instead of `kd.optim.partial_updates`"
        _run.check_chain(state.opt_state, self.plan, self.clip, remedy)

    def _step(
        self, state: kd.train.TrainState, batch: Any
    ) -> tuple[kd.train.TrainState, kd.train.Context]:
        shown = kd.train.Context(
            step=state.step, batch=None, loss_states={}, metric_states={}, summary_states={}
        )
        if not isinstance(batch, _Inputs):  # Kauldron asks for the shapes of the context
            return state, shown
        trained, frozen = self._split(state.params)
        grad_fn = dpoptax.clipped_grad(
            self._example_loss(state.step, frozen),
            self.clip,
            microbatch_size=self.microbatch_size,
            method=self.method,
            grid=self.plan.grid(self.clip),
            **self._devices(state.params),
        )
        points = dpoptax.gradient_points(state.opt_state, trained)
        grads = grad_fn(points, batch.examples, batch.mask, key=batch.key, ids=batch.ids)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
        params = _merge(optax.apply_updates(trained, updates), frozen)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), shown

    def _example_loss(self, step: jax.Array, frozen: Any) -> Callable[..., jax.Array]:
        """Returns the sum of the losses for one example."""

        def loss_fn(trained: Any, example: Any, key: jax.Array) -> jax.Array:
            context = kd.train.Context(
                step=step,
                batch=jax.tree.map(lambda x: x[None], example),
                # On a mesh, JAX refuses to index an array that the loss closes over.
                params=_merge(trained, jax.lax.stop_gradient(frozen)),
                collections={},
            )
            names = [name for name, each in self.rng_streams.streams.items() if each.train]
            rngs = {name: kd.random.PRNGKey(key).fold_in(name) for name in names}
            return train_step.forward_with_loss(
                context, model=self.model, losses=self.aux.losses, rngs=rngs, is_training=True
            )[0]

        return per_user_loss(loss_fn) if self.plan.sampler.unit == "user" else loss_fn

    def _split(self, params: Any) -> tuple[Any, Any]:
        """Returns the trained and the frozen parameters."""
        if self.trained is None:
            return params, {}
        flat, mask = map(traverse_util.flatten_dict, (params, self.trained(params)))
        if not any(mask.values()):
            raise ValueError(f"`trained` must select parameters, got none of {list(flat)}.")
        parts = ({k: x for k, x in flat.items() if mask[k] == kept} for kept in (True, False))
        trained, frozen = map(traverse_util.unflatten_dict, parts)
        return trained, frozen

    def _devices(self, params: Any) -> dict[str, Any]:
        """Returns the arguments of `clipped_grad` for the devices that share a batch, if any."""
        mesh, axes = _trainer_settings.batch_axes(self.sharding.batch)
        if not axes:
            return {}
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        placed = kd.sharding.with_sharding_constraint(shapes, self.sharding.params)
        specs = _run.specs_of(self._split(placed)[0])
        return {"mesh": mesh, "axis_name": axes, "param_specs": specs}


def guarantee(trainer: kd.train.Trainer, state: kd.train.TrainState) -> Guarantee:
    """Returns the guarantee of the steps of a state. `print` states it."""
    _run.check_step(state.opt_state, int(state.step))
    return trainer.trainstep.plan.guarantee(state.opt_state)


def export(trainer: kd.train.Trainer, state: kd.train.TrainState, folder: str) -> list[epath.Path]:
    """Writes the parameters and the guarantee in plain language to a folder that may be published.

    It returns both paths. Do not publish files of `workdir`: each checkpoint holds the noise key in
    the same files as the parameters, and the configuration may hold key and seed.
    """
    place = epath.Path(folder).resolve()
    params, statement = place / "params", place / "statement.txt"
    text = guarantee(trainer, state).statement()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(params, state.params)
    statement.write_text(text)
    return [params, statement]


def _on_all_devices(x: jax.Array) -> jax.Array:
    """Replicates an array unless it is placed. Kauldron's loop disallows to do it later."""
    return x if x.committed else jax.device_put(x, kd.sharding.REPLICATED)


def _merge(trained: Any, frozen: Any) -> Any:
    """Returns all parameters from their two parts."""
    flat = traverse_util.flatten_dict
    return traverse_util.unflatten_dict({**flat(frozen), **flat(trained)}) if frozen else trained
