"""Resolves a config under its plan to model, clip, optimizer and step."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax

from dpoptax.training.config import TrainConfig
from dpoptax.training.errors import ConfigError
from dpoptax.training.models import example_loss, has_random_loss
from dpoptax.training.roles import Role, fields_with
from dpoptax.training.run import records, seeds
from dpoptax.training.run.chain import TrainingChain, build_chain
from dpoptax.training.run.run_plan import RunPlan
from dpoptax.training.run.step import TrainingStep

if TYPE_CHECKING:
    from dpoptax import accounting


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A config with its plan, model and chain.

    Attributes:
        config: The config. If its seed is None, summaries do not reveal the drawn seed.
        plan: Sampler with seed, noise and permitted steps.
        model: Maps one example's inputs to logits.
        chain: Clip, noise, filter and optimizer.
        init_key: Key of the initial parameters.
    """

    config: TrainConfig
    plan: RunPlan
    model: nn.Module
    chain: TrainingChain
    init_key: jax.Array

    @property
    def step(self) -> TrainingStep:
        """The training step."""
        return build_step(self.chain, self.model)

    @property
    def fields(self) -> dict[str, Any]:
        """Fields that must not change when the run resumes, as JSON without the seed."""
        config, plan = self.config, self.plan
        sampler = dataclasses.asdict(plan.sampler)
        del sampler["seed"], sampler["owners"]  # compared with the data
        fields, free = config.to_dict(), fields_with(config, Role.CHANGEABLE)
        # The strategy of correlated noise depends on the number of steps. So does a schedule of the
        # learning rate: with another schedule, repeated steps would add the same noise to gradients
        # at other parameters.
        of_steps = plan.strategy is not None or config.schedule != "constant"
        found: dict[str, Any] = records.plain(
            {
                "dataset_size": sampler.pop("dataset_size"),
                "sampling": config.sampling,
                "batch_size": sampler.pop("batch_size"),
                "microbatch_size": fields.pop("microbatch_size"),
                **sampler,
                "method": fields.pop("method"),
                "noise_multiplier": plan.noise_multiplier,
                **{name: value for name, value in fields.items() if name not in free},
                **({"steps": config.steps} if of_steps else {}),
            }
        )
        return found

    def guarantee(self, opt_state: Any) -> "accounting.Guarantee | None":
        """Returns the guarantee of the ledger in the final state, or None without a guarantee."""
        from dpoptax import accounting

        plan = self.plan
        if plan.promise is None or plan.noise_multiplier == 0:
            return None
        found = accounting.guarantee(
            opt_state, plan.sampler, delta=plan.delta, accountant=plan.promise.accountant
        )
        return dataclasses.replace(found, drawn=True)

    def summary(self, guarantee: "accounting.Guarantee | None") -> dict[str, Any]:
        """Returns the part of the summary on privacy."""
        config, plan = self.config, self.plan
        epsilon = None if guarantee is None else guarantee.stated_epsilon
        return {
            "method": config.method.name,
            "private": epsilon is not None and math.isfinite(epsilon),
            "unproven": plan.unproven,
            "epsilon": epsilon,
            "delta": plan.delta,
            "noise_multiplier": plan.noise_multiplier if config.method.private else None,
            "noise_strategy": None if plan.strategy is None else repr(plan.strategy),
            "l2_clip_norm": config.l2_clip_norm if config.method.private else None,
            "accountant": config.accountant,
            **plan.sampler.describe(),
            "unit": config.unit,
            "records_per_user": config.records_per_user,
            "assumed_secret": [] if epsilon is None or config.seed is None else ["config.seed"],
        }


def resolve(
    config: TrainConfig,
    plan: RunPlan,
    *,
    num_classes: int | None,
) -> ResolvedRun:
    """Resolves a config under its plan.

    Args:
        config: The config.
        plan: The plan of this config, from `make_run_plan`.
        num_classes: Number of classes of the data.

    Raises:
        ConfigError: As for `build_model` and `build_chain`.
    """
    model = config.build_model(num_classes)
    init_key, keys = seeds.keys(plan.seed, config.generator)
    random = has_random_loss(model)
    if random and not config.method.private:
        raise ConfigError(
            "`model` must have a loss without a key for training without privacy, got "
            f"{config.model!r}. Remove the key, or use a private method."
        )
    chain = build_chain(config, plan.noise_multiplier, keys, random=random)
    return ResolvedRun(config, plan, model, chain, init_key)


def build_step(chain: TrainingChain, model: nn.Module) -> TrainingStep:
    """Returns the training step of a chain and a model."""
    config = chain.config

    def loss(params: Any, example: Any, *key: jax.Array, frozen: Any) -> jax.Array:
        loss_fn = config.method.loss(example_loss(model, frozen))
        value: jax.Array = loss_fn(params, example, *key)
        return value

    return TrainingStep(
        loss,
        chain.clip if config.method.private else None,
        chain.optimizer,
        config.batch_size,
        per_user=config.unit == "user",
        microbatch_size=config.microbatch_size,
        key=(chain, model),
    )
