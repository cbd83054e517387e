"""Trains MaxText's models privately, with the trainer for tunix.

MaxText's own SFT trainer is one of tunix. `make_trainer` builds MaxText's model and loss from a
config of MaxText, and trains them with `PrivateTrainer` instead:

    config = pyconfig.initialize_pydantic(["", "sft.yml", "packing=false", …])
    trainer, mesh = make_trainer(config, plan, key)
    train(config, trainer, mesh, plan_batches(plan, make_rows(tokens, is_completion)))
    print(guarantee(trainer))

`tests/integrations/maxtext.txt` is the environment. MaxText's hooks are not used: they log the
number of tokens of private batches, and may stop training at a loss of private batches.
"""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.optimizers import optimizers
from maxtext.trainers.post_train.sft import train_sft
from maxtext.utils import lora_utils, maxtext_utils, model_creation_utils

import dpoptax
from dpoptax.integrations.tunix import PrivateTrainer


class UnhookedTrainer(PrivateTrainer):
    """A `PrivateTrainer` that refuses hooks, since those of MaxText read private batches."""

    def with_training_hooks(self, training_hooks: Any) -> None:
        raise ValueError(
            "`training_hooks` must not be set: MaxText's hooks log the numbers of tokens of "
            "private batches, and stop at their loss."
        )


def check_config(config: Any) -> None:
    """Raises an error if a setting of MaxText mixes examples or changes the private sum."""
    refused = {
        "packing": (config.packing, "a packed row holds several examples"),
        "gradient_clipping_threshold": (
            config.gradient_clipping_threshold > 0,
            "each example is clipped already, by `clip`",
        ),
        "num_experts": (config.num_experts > 1, "its balance of experts mixes examples"),
        "mtp_num_layers": (config.mtp_num_layers > 0, "its loss has not been tested"),
    }
    for name, (found, reason) in refused.items():
        if found:
            raise ValueError(f"`{name}` must be off, got {getattr(config, name)}: {reason}.")


def make_trainer(
    config: Any, plan: dpoptax.PrivacyPlan, clip: float = 1.0, *, key: jax.Array | None = None
) -> tuple[PrivateTrainer, jax.sharding.Mesh]:
    """Returns the trainer of MaxText's model, and its mesh.

    Args:
      config: A config of MaxText for SFT.
      plan: The plan. Its steps are at least those of the config.
      clip: The clip of each example's gradient.
      key: The noise key, to repeat a run; None draws one from the operating system.

    Raises:
      ValueError: A setting contradicts the guarantee.
    """
    check_config(config)
    train_sft.validate_config(config)
    model, mesh = model_creation_utils.from_pretrained(config)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        if config.lora.enable_lora:
            model = lora_utils.apply_lora_to_model(model, mesh, config)
        schedule = maxtext_utils.create_learning_rate_schedule(config)
        chain = optax.chain(
            plan.new_run(key).noise(clip=clip), optimizers.get_optimizer(config, schedule, model)
        )
        nnx.pop(model, nnx.Intermediate)
        trainer = UnhookedTrainer(
            model, chain, train_sft.get_tunix_config(config), plan=plan, clip=clip
        )
        return train_sft.use_maxtext_loss_function(trainer, config), mesh


def make_rows(tokens: np.ndarray, is_completion: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the training rows from tokens, (N, L + 1), padded with 0.

    `is_completion` marks the tokens that the loss counts.
    """
    real = tokens != 0
    counted = real & is_completion
    places = np.broadcast_to(np.arange(tokens.shape[1] - 1, dtype=np.int32), tokens[:, 1:].shape)
    return {
        "inputs": tokens[:, :-1].astype(np.int32),
        "inputs_position": places,
        "inputs_segmentation": real[:, :-1].astype(np.int32),
        "targets": tokens[:, 1:].astype(np.int32),
        "targets_position": places,
        "targets_segmentation": counted[:, 1:].astype(np.int32),
    }


def train(config: Any, trainer: PrivateTrainer, mesh: jax.sharding.Mesh, batches: Any) -> None:
    """Trains on batches, `plan_batches(plan, make_rows(…))`."""
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        trainer.train(batches)
