"""Private training with Kauldron: a `TrainStep` that adds noise.

    plan = dpoptax.PrivacyPlan(dataset_size=N, batch_size=B, steps=T, epsilon=3.0, delta=1e-6)
    trainer = kd.train.Trainer(
        train_ds=plan_batches(plan, rows),
        optimizer=optax.chain(plan.new_run().noise(), optax.adam(1e-3)),
        trainstep=PrivateTrainStep(plan=plan),
        num_train_steps=T - 1,
        …,
    )
    state, _ = trainer.train()
    print(guarantee(trainer, state))

Written for kauldron 1.4.2 and 1.4.4. `docs/examples/fine-tune.md` has a complete example.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.training import hosts
from dpoptax.training.errors import explains_missing
from dpoptax.training.run.arguments import param_specs
from dpoptax.users import UserTable

with explains_missing(__name__, "kauldron gemma 'dpoptax[train]'"):
    import orbax.checkpoint as ocp
    from etils import enp, epath
    from kauldron import kd
    from kauldron.data import iterators
    from kauldron.train import train_step

    from dpoptax.integrations import _run

__all__ = ["PrivateTrainStep", "export", "guarantee", "plan_batches"]


def __dir__() -> list[str]:
    return __all__


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrivateTrainStep(kd.train.TrainStep):
    """Trains parameters privately, all of them or the selected ones.

    It differs from `TrainStep` in its step, which clips the gradient of each example and adds the
    plan's noise. Losses, metrics and summaries of private batches are private: the trainer writes
    none of them. The losses get batches of one example, so no example affects the loss of another.

    Privacy: `guarantee(trainer, state)` covers the parameters of all steps. Checkpoints hold the
    noise key and must stay private. `export` writes files that may be published. A run that goes on
    after a crash repeats the steps after its last checkpoint with the same noise. Other rows,
    losses or settings raise an error, also after the last step.

    Args:
      plan: its N is the number of rows. Kauldron runs `num_train_steps` + 1
        steps, at most T.
      clip: the clip of each example's gradient, as for `clipped_grad`.
      trained: selects the trained parameters, such as `kd.optim.select("lora")`; all by default.
        The optimizer gets these parameters only.
      public_evals: the names of all evaluators of the trainer. Their data count as public: their
        losses, metrics and summaries are written without noise.
      microbatch_size: as for `clipped_grad`.
      method: as for `clipped_grad`.
      precision: as for `clipped_grad`.

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
    method: Literal["auto", "vmap", "recompute", "streaming"] = "auto"
    precision: Literal["float32", "bfloat16"] | None = None
    # The data, the folder of checkpoints, the inputs of the next steps, and the last step. Secret.
    _seen: dict[str, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def update_from_root_cfg(self, root_cfg: kd.train.Trainer) -> "PrivateTrainStep":
        """Returns the step of a trainer, or raises an error if a setting of it is not private."""
        data = _check_trainer(root_cfg, self.plan, self.public_evals)
        made = super().update_from_root_cfg(root_cfg)
        # Not `workdir` of the trainer: a checkpointer may have its own.
        folder = getattr(root_cfg.checkpointer, "workdir", None)
        made._seen.update(data=data, folder=folder, step=None)
        return made

    def _init_optimizer(self, state: kd.train.TrainState) -> kd.train.TrainState:
        """Returns the state with that of the optimizer.

        Unlike Kauldron's, it is not compiled: the program, and a cache of programs on disk, would
        contain the noise key.
        """
        opt_state = self.optimizer.init(self._split(state.params)[0])
        traced = isinstance(state.step, jax.core.Tracer)  # Kauldron asks for shapes
        opt_state = jax.tree.map(jnp.zeros_like if traced else _on_all_devices, opt_state)
        made = state.replace(opt_state=opt_state)
        return kd.sharding.with_sharding_constraint(made, self.sharding.state)

    def step(
        self, state: kd.train.TrainState, batch: Any, **options: Any
    ) -> tuple[kd.train.TrainState, kd.train.AuxiliariesState]:
        """Returns the state after a step on the plan's batch. It returns no losses and metrics.

        `batch` is empty: the step reads the batch of its number.
        """
        if jax.tree.leaves(batch):
            raise TypeError(
                "`batch` must come from `plan_batches(plan, rows)`, because ε holds for random "
                f"batches of the plan, got a {type(batch).__name__} of data."
            )
        seen = self._seen
        with jax.transfer_guard("allow"):
            # The checks wait for the state, so they are made once for each run.
            if seen["step"] is not state.step:
                self._start(state)
            inputs = next(seen["inputs"])
        del options  # whatever is asked for, the same program returns nothing
        state, aux = super().step(
            state, inputs, return_losses=True, return_metrics=True, return_summaries=True
        )
        seen["step"] = state.step
        return state, aux

    def _start(self, state: kd.train.TrainState) -> None:
        """Checks the first state of a run, or of a restored run, and starts to read its batches."""
        if state.collections:
            raise ValueError(
                f"`model` must have no variables except parameters, got {list(state.collections)}: "
                "statistics of a batch mix its examples. Use `nn.LayerNorm` or `nn.GroupNorm`."
            )
        step, data = int(state.step), self._seen["data"]
        _run.check_state(state.opt_state, step, self.plan, self.clip)
        trained, frozen = self._split(state.params)

        def taken(opt_state: Any, trained: Any, inputs: _run.Inputs) -> Any:
            return self._update(opt_state, trained, inputs, 0, frozen, rows=None, specs=None)

        program = _run.program_of(taken, data, state.opt_state, trained)
        _run.check_run(data, state.opt_state, trained, step, program, self._seen["folder"])
        self._seen["inputs"] = _run.step_inputs(data, state.opt_state, self.sharding.batch)

    def _step(
        self, state: kd.train.TrainState, batch: Any
    ) -> tuple[kd.train.TrainState, kd.train.Context]:
        shown = kd.train.Context(
            step=state.step, batch=None, loss_states={}, metric_states={}, summary_states={}
        )
        if not isinstance(batch, _run.Inputs):  # Kauldron asks for the shapes of the context
            return state, shown
        trained, frozen = self._split(state.params)
        shapes = jax.eval_shape(lambda x: x, state.params)
        placed = kd.sharding.with_sharding_constraint(shapes, self.sharding.params)
        specs = param_specs(self._split(placed)[0])
        args = state.opt_state, trained, batch, state.step, frozen
        trained, opt_state = self._update(*args, rows=self.sharding.batch, specs=specs)
        params = _merge(trained, frozen)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), shown

    def _update(
        self,
        opt_state: Any,
        trained: Any,
        inputs: _run.Inputs,
        step: jax.Array | int,
        frozen: Any,
        *,
        rows: Any,
        specs: Any,
    ) -> tuple[Any, Any]:
        """Returns the trained parameters and the optimizer's state after a step."""
        return _run.update(
            self._example_loss(step, frozen),
            self.optimizer,
            opt_state,
            trained,
            inputs,
            plan=self.plan,
            clip=self.clip,
            rows=rows,
            specs=specs,
            microbatch_size=self.microbatch_size,
            method=self.method,
            precision=self.precision,
        )

    def _example_loss(self, step: jax.Array | int, frozen: Any) -> Callable[..., jax.Array]:
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

        return loss_fn

    def _split(self, params: Any) -> tuple[Any, Any]:
        """Returns the trained and the frozen parameters, with None for the others."""
        mask = self.trained(params) if self.trained else jax.tree.map(lambda _: True, params)
        if not any(jax.tree.leaves(mask)):
            paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
            raise ValueError(f"`trained` must select parameters, got none of {paths}.")
        trained = jax.tree.map(lambda x, kept: x if kept else None, params, mask)
        frozen = jax.tree.map(lambda x, kept: None if kept else x, params, mask)
        return trained, frozen


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _PlanPipeline(kd.data.Pipeline):
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


def plan_batches(
    plan: dpoptax.PrivacyPlan, rows: Any, *, users: UserTable | None = None
) -> _PlanPipeline:
    """Returns the `train_ds` of a trainer with a `PrivateTrainStep`.

    The step reads each batch when it needs it. A restored run goes on at its step, and reads no
    batch of a finished step.

    Args:
      plan: the plan of the step.
      rows: a tree of arrays with N rows each, as for `PrivateRun.batches`, usually a dictionary. A
        run that goes on after a restart must get the same rows in the same order.
      users: the table of owners that made the plan's sampler, if the plan draws users.
    """
    return _PlanPipeline(
        data=_run.PlanBatches(plan, rows, users), batch_size=plan.sampler.batch_size, seed=None
    )


def guarantee(trainer: kd.train.Trainer, state: kd.train.TrainState) -> Guarantee:
    """Returns the guarantee of the steps of a state. `print` states it."""
    _run.check_step(state.opt_state, int(state.step))
    return trainer.trainstep.plan.continue_run(state.opt_state).guarantee(state.opt_state)


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


def _check_trainer(
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


def _on_all_devices(x: jax.Array) -> jax.Array:
    """Replicates an array unless it is placed. Kauldron's loop disallows to do it later."""
    return x if x.committed else hosts.replicate(x, kd.sharding.DEVICES_MESH)


def _merge(trained: Any, frozen: Any) -> Any:
    """Returns all parameters from their two parts."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, trained, frozen, is_leaf=lambda x: x is None
    )
