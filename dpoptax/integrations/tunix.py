"""Private fine-tuning with tunix: a `PeftTrainer` whose step adds noise.

    plan = dpoptax.PrivacyPlan(dataset_size=N, batch_size=B, steps=T, epsilon=3.0, delta=1e-6)
    optimizer = optax.chain(plan.new_run().noise(), optax.adam(1e-3))
    trainer = PrivateTrainer(model, optimizer, config, plan=plan)
    trainer.train(plan_batches(plan, rows))
    print(guarantee(trainer))

Written for google-tunix 0.1.7. `docs/examples/fine-tune.md` has a complete example.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import pxla
from jax.sharding import NamedSharding, PartitionSpec

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.training.errors import explains_missing
from dpoptax.training.run.arguments import param_specs
from dpoptax.users import UserTable

with explains_missing(__name__, "google-tunix qwix 'dpoptax[train]'"):
    from etils import epath
    from flax import nnx
    from tunix.sft import metrics_logger, peft_trainer

    from dpoptax.integrations import _run

__all__ = ["PrivateTrainer", "guarantee", "plan_batches", "publishable_folders"]


def __dir__() -> list[str]:
    return __all__


class PrivateTrainer(peft_trainer.PeftTrainer):
    """Trains a model's LoRA parameters privately, or all parameters if it has none.

    It differs from `PeftTrainer` in its step, which clips the gradient of each example and adds the
    plan's noise. Losses, perplexities and gradient norms of private batches are private: hooks get
    NaN, and logs, the progress bar and the history get nothing. The loss function gets batches of
    one example, so no example affects the loss of another.

    Privacy: `guarantee(trainer)` covers the parameters of all steps. Checkpoints hold the noise key
    and must stay private, except `publishable_folders(trainer)`. A run that goes on after a crash
    repeats the steps after its last checkpoint with the same noise. Other rows, another loss or
    other settings raise an error, also after the last step.

    Args:
      model: the model. Its streams of random numbers, as for dropout, get a new key for each step
        and record.
      optimizer: `optax.chain(plan.new_run().noise(), …)`.
      training_config: the `TrainingConfig`, without gradient accumulation. On a mesh, the first
        entry of `data_sharding_axis` names the axes that share the examples.
      plan: its N is the number of rows.
      clip: the clip of each example's gradient, as for `clipped_grad`.
      microbatch_size: as for `clipped_grad`. It replaces gradient accumulation.
      method: as for `clipped_grad`.
      precision: as for `clipped_grad`.
      **options: further arguments of `PeftTrainer`.

    Raises:
      TypeError: `plan` or `train_ds` has the wrong type.
      ValueError: a setting, checkpoint or optimizer contradicts the guarantee. The message names
        it.
    """

    supports_sequence_packing = False  # a packed row would hold several examples

    def __init__(
        self,
        model: nnx.Module,
        optimizer: optax.GradientTransformation,
        training_config: peft_trainer.TrainingConfig,
        *,
        plan: dpoptax.PrivacyPlan,
        clip: dpoptax.Clip | float = 1.0,
        microbatch_size: int | None = None,
        method: Literal["auto", "vmap", "recompute", "streaming"] = "auto",
        precision: Literal["float32", "bfloat16"] | None = None,
        **options: Any,
    ) -> None:
        _run.check_plan(plan)
        _check_variables(model)
        self.plan = plan
        self._update = functools.partial(
            _run.update,
            plan=plan,
            clip=clip,
            microbatch_size=microbatch_size,
            method=method,
            precision=precision,
        )
        super().__init__(model, optimizer, training_config, **options)
        _run.check_state(self._opt_state, self.train_steps, plan, clip)

    def train(
        self,
        train_ds: _run.PlanBatches,
        eval_ds: None = None,
        skip_jit: bool = False,
        *,
        public_eval_ds: Iterable[Any] | None = None,
        cache_nnx_graph: bool = True,
    ) -> None:
        """Trains on the plan's batches until its last step or `max_steps`.

        Args:
          train_ds: `plan_batches(plan, rows)`.
          eval_ds: must be None.
          skip_jit: as for `PeftTrainer`.
          public_eval_ds: batches for evaluation, which count as public. Their losses are logged.
          cache_nnx_graph: as for `PeftTrainer`.
        """
        if eval_ds is not None:
            raise ValueError(
                "`eval_ds` must be None, because its losses are logged without noise. Pass data "
                "that are public as `public_eval_ds`."
            )
        for name in ("data_hooks", "is_managed_externally"):
            if getattr(self, name):
                raise ValueError(f"`{name}` must not be set, because the plan draws the batches.")
        data = _run.check_data(train_ds, self.plan, "max_steps", self.config.max_steps)
        _run.check_step(self._opt_state, self.train_steps)
        random = bool(_streams(self.model))
        self._check_run(data, random=random)
        inputs = _run.step_inputs(data, self._opt_state, self._rows, random=random)
        # The base class skips one batch for each finished step. These are not read again.
        skipped = itertools.repeat(None, self.iter_steps)
        super().train(
            itertools.chain(skipped, inputs),
            public_eval_ds,
            skip_jit,
            cache_nnx_graph=cache_nnx_graph,
        )

    def _check_run(self, data: _run.PlanBatches, *, random: bool) -> None:
        """Raises an error unless the trainer starts or continues one run."""
        loss_fn, params = self._example_loss(self.model, self.optimizer.wrt)

        def taken(opt_state: Any, params: Any, inputs: _run.Inputs) -> Any:
            state = self.optimizer.tx, opt_state, params
            return self._update(loss_fn, *state, inputs, rows=None, specs=None)

        program = _run.program_of(taken, data, self._opt_state, params, random=random)
        folder = self.config.checkpoint_root_directory
        _run.check_run(data, self._opt_state, params, self.train_steps, program, folder)

    def _example_loss(
        self, model: nnx.Module, trained: nnx.filterlib.Filter
    ) -> tuple[Callable[..., jax.Array], Any]:
        """Returns the loss of one example, and the parameters that it is differentiated in."""
        graph, *states = nnx.split(model, trained, ...)
        params, rest = map(nnx.as_pure, states)
        names = sorted({stream.tag for stream in _streams(model)})

        def example_loss_fn(params: Any, example: Any, *key: jax.Array) -> jax.Array:
            # On a mesh, JAX refuses to index an array that the loss closes over.
            own = nnx.merge(graph, params, jax.lax.stop_gradient(rest))
            for record_key in key:
                keys: Any = {n: jax.random.fold_in(record_key, i) for i, n in enumerate(names)}
                nnx.reseed(own, policy="match_shape", **keys)
            inputs = self.gen_model_input_fn(jax.tree.map(lambda x: x[None], example))
            found = self.loss_fn(own, **inputs)
            return found[0] if isinstance(found, tuple) else found

        return example_loss_fn, params

    def create_train_step_fn(self) -> Callable[..., tuple[jax.Array, None, jax.Array]]:
        """Returns the private step. It returns NaN as loss and gradient norm, and no aux."""
        rows = self._rows
        specs = param_specs(nnx.as_pure(nnx.state(self.model, self.optimizer.wrt)))

        def train_step(
            model: nnx.Module, optimizer: nnx.Optimizer, inputs: _run.Inputs
        ) -> tuple[jax.Array, None, jax.Array]:
            loss_fn, params = self._example_loss(model, optimizer.wrt)
            state = optimizer.tx, nnx.as_pure(optimizer.opt_state), params
            params, opt_state = self._update(loss_fn, *state, inputs, rows=rows, specs=specs)
            nnx.update(model, params)
            nnx.update(optimizer.opt_state, nnx.state(opt_state))
            optimizer.step[...] += 1
            not_shown = jnp.full((), jnp.nan)
            return not_shown, None, not_shown

        return train_step

    @property
    def _opt_state(self) -> Any:
        return nnx.as_pure(self.optimizer.opt_state)

    @property
    def _rows(self) -> NamedSharding | None:
        """Returns how a batch is split over the mesh around the trainer, if any."""
        mesh = pxla.thread_resources.env.physical_mesh
        if mesh.empty:
            return None
        return NamedSharding(mesh, PartitionSpec(self.config.data_sharding_axis[0]))

    def _log_metrics(self, *args: Any, **options: Any) -> None:
        """Logs metrics of public data only. TensorBoard would warn of each NaN."""
        if self._mode == metrics_logger.Mode.EVAL:
            super()._log_metrics(*args, **options)

    @property
    def _tqdm_train_metrics(self) -> list[str]:
        return []

    def _run_eval(self, *args: Any, **options: Any) -> None:
        """Evaluates after the state is saved: a step that was shown is not repeated."""
        self._save_last_checkpoint()
        manager = self.checkpoint_manager._checkpoint_manager
        if manager is not None:
            manager.wait_until_finished()
        super()._run_eval(*args, **options)


def plan_batches(
    plan: dpoptax.PrivacyPlan, rows: Any, *, users: UserTable | None = None
) -> _run.PlanBatches:
    """Returns the training data of a `PrivateTrainer`.

    The trainer reads the batch of each step when it needs it, and starts at its own step. So a
    restored run reads no batch of a finished step.

    Args:
      plan: the trainer's plan.
      rows: a tree of arrays with N rows each, as for `PrivateRun.batches`. A trainer that goes on
        after a restart must get the same rows in the same order.
      users: the table of owners that made the plan's sampler, if the plan draws users.
    """
    return _run.PlanBatches(plan, rows, users)


def guarantee(trainer: PrivateTrainer) -> Guarantee:
    """Returns the guarantee of the trainer's steps so far. `print` states it."""
    state = trainer._opt_state
    return trainer.plan.continue_run(state).guarantee(state)


def publishable_folders(trainer: PrivateTrainer) -> list[epath.Path]:
    """Returns the folders in the trainer's checkpoints that may be published: the parameters.

    All other files hold the noise key, or fingerprints of it and of the sampler's seed.
    """
    folder = trainer.config.checkpoint_root_directory
    found = [] if folder is None else sorted(epath.Path(folder).glob("*/model_params"))
    return [parameters for parameters in found if parameters.parent.name.isdigit()]


def _check_variables(model: nnx.Module) -> None:
    """Raises an error if the model has statistics of batches.

    A merged copy of the model would drop their updates without a message.
    """
    for path, each in nnx.iter_graph(model):
        if isinstance(each, nnx.BatchStat):
            raise ValueError(
                f"`model` must not have `nnx.BatchStat`, got one at {'.'.join(map(str, path))}: "
                "statistics of a batch mix its examples. Use `nnx.LayerNorm` or `nnx.GroupNorm`."
            )


def _streams(model: nnx.Module) -> list[nnx.RngStream]:
    """Returns the model's streams of random numbers, as for dropout."""
    return [each for _, each in nnx.iter_graph(model) if isinstance(each, nnx.RngStream)]
