"""Private fine-tuning with tunix: a `PeftTrainer` whose step adds noise.

    plan = dpoptax.PrivacyPlan(dataset_size=N, batch_size=B, steps=T, epsilon=3.0, delta=1e-6)
    optimizer = optax.chain(plan.noise(key), optax.adam(1e-3))
    trainer = PrivateTrainer(model, optimizer, config, plan=plan)
    trainer.train(plan_batches(plan, rows))
    print(guarantee(trainer))

Written for google-tunix 0.1.7. `docs/examples/fine-tune.md` has a complete example.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from absl import logging
from etils import epath
from flax import nnx
from jax.interpreters import pxla
from tunix.sft import metrics_logger, peft_trainer

import dpoptax
from dpoptax.accounting import Guarantee
from dpoptax.integrations import _nnx, _run
from dpoptax.integrations._run import plan_batches as plan_batches
from dpoptax.users import per_user_loss


class PrivateTrainer(peft_trainer.PeftTrainer):
    """Trains a model's LoRA parameters privately, or all parameters if it has none.

    It differs from `PeftTrainer` in its step, which clips the gradient of each example and adds the
    plan's noise. Losses, perplexities and gradient norms of private batches are private: hooks get
    NaN, and logs, the progress bar and the history get nothing. The loss function gets batches of
    one example, so no example affects the loss of another.

    Privacy: `guarantee(trainer)` covers the parameters of all steps. Checkpoints hold the noise key
    and must stay private, except `publishable_folders(trainer)`. A run that goes on after a crash
    repeats the steps after its last checkpoint with the same noise. It must have the same rows,
    loss and optimizer.

    Args:
      model: the model. Its streams of random numbers, as for dropout, get a new key for each step
        and record.
      optimizer: `optax.chain(plan.noise(key), …)`.
      training_config: the `TrainingConfig`, without gradient accumulation. On a mesh, the first
        entry of `data_sharding_axis` names the axes that share the examples.
      plan: its N is the number of rows. It needs a seed if the run has checkpoints.
      clip: the clip of each example's gradient, as for `clipped_grad`.
      microbatch_size: as for `clipped_grad`. It replaces gradient accumulation.
      method: as for `clipped_grad`.
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
        method: Literal["auto", "vmap", "recompute", "integers"] = "auto",
        **options: Any,
    ) -> None:
        accumulated = training_config.gradient_accumulation_steps
        _run.check_accumulation("gradient_accumulation_steps", accumulated)
        _nnx.check_variables(model)
        folder = training_config.checkpoint_root_directory
        self.plan, self._given_plan = _run.run_plan(plan, folder), plan
        self._clipping = {
            "clip": clip,
            "microbatch_size": microbatch_size,
            "method": method,
            "grid": plan.grid(clip),
        }
        super().__init__(model, optimizer, training_config, **options)
        _run.check_chain(self._opt_state, self.plan, clip)
        _run.check_step(self._opt_state, self.train_steps)
        _run.check_folder(folder, self.plan, self._opt_state, self.train_steps)

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
        data = _run.check_batches(train_ds, self._given_plan)
        _run.check_max_steps("max_steps", self.config.max_steps, self.plan)
        _run.check_step(self._opt_state, self.train_steps)
        logging.info(_run.NOT_SHOWN)
        # The base class skips one batch for each finished step. These are not read again.
        skipped = itertools.repeat(None, self.iter_steps)
        batches = self.plan.batches(data.rows, start=self.train_steps, users=data.users)
        super().train(
            itertools.chain(skipped, batches),
            public_eval_ds,
            skip_jit,
            cache_nnx_graph=cache_nnx_graph,
        )

    def create_train_step_fn(self) -> Callable[..., tuple[jax.Array, None, jax.Array]]:
        """Returns the private step. It returns NaN as loss and gradient norm, and no aux."""
        clipping = {**self._clipping, **self._devices()}

        def train_step(
            model: nnx.Module, optimizer: nnx.Optimizer, batch: dict[str, Any]
        ) -> tuple[jax.Array, None, jax.Array]:
            loss_fn, params = _nnx.example_loss(
                model, optimizer.wrt, self.loss_fn, self.gen_model_input_fn
            )
            if self.plan.sampler.unit == "user":
                loss_fn = per_user_loss(loss_fn)
            opt_state = nnx.as_pure(optimizer.opt_state)
            points = dpoptax.gradient_points(opt_state, params)
            grads = dpoptax.clipped_grad(loss_fn, **clipping)(points, **batch)
            updates, opt_state = optimizer.tx.update(grads, opt_state, params)
            nnx.update(model, optax.apply_updates(params, updates))
            nnx.update(optimizer.opt_state, nnx.state(opt_state))
            optimizer.step[...] += 1
            not_shown = jnp.full((), jnp.nan)
            return not_shown, None, not_shown

        return train_step

    @property
    def _opt_state(self) -> Any:
        return nnx.as_pure(self.optimizer.opt_state)

    def _devices(self) -> dict[str, Any]:
        """Returns the arguments of `clipped_grad` for the mesh around the trainer, if any."""
        mesh = pxla.thread_resources.env.physical_mesh
        if mesh.empty:
            return {}
        params = nnx.as_pure(nnx.state(self.model, self.optimizer.wrt))
        axes = self.config.data_sharding_axis[0]
        return {"mesh": mesh, "axis_name": axes, "param_specs": _run.specs_of(params)}

    def _prepare_inputs(self, input_data: Any) -> Any:
        """Returns the arguments of `clipped_grad` for a private batch; public batches unchanged."""
        if not isinstance(input_data, dpoptax.Batch):
            return input_data
        batch = {"batch": input_data.examples, "mask": input_data.mask}
        if _nnx.has_streams(self.model):
            words = _run.noise_key_words(self._opt_state)
            batch |= {"key": _run.step_key(words, input_data.step), "ids": input_data.ids}
        return batch

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


def guarantee(trainer: PrivateTrainer) -> Guarantee:
    """Returns the guarantee of the trainer's steps so far. `print` states it."""
    return trainer.plan.guarantee(nnx.as_pure(trainer.optimizer.opt_state))


def publishable_folders(trainer: PrivateTrainer) -> list[epath.Path]:
    """Returns the folders in the trainer's checkpoints that may be published: the parameters.

    All other files hold the noise key, or fingerprints of it and of the sampler's seed.
    """
    folder = trainer.config.checkpoint_root_directory
    found = [] if folder is None else sorted(epath.Path(folder).glob("*/model_params"))
    return [parameters for parameters in found if parameters.parent.name.isdigit()]
