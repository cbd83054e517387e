"""Resolves a config within its plan: its model, its clip and its optimizer."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax

from dpoptax.training.config import TrainConfig
from dpoptax.training.run import seeds
from dpoptax.training.run.chain import TrainingChain, build_chain
from dpoptax.training.run.privacy import RunPlan
from dpoptax.training.run.seeds import Keys


@dataclasses.dataclass(frozen=True)
class ResolvedRun:
    """A config with everything that follows from it and from its data.

    Attributes:
        config: The config. If its seed is None, summaries do not reveal the drawn seed.
        plan: Its sampler, with the seed, and its budget.
        model: Maps one example's inputs to logits.
        chain: Its clip, noise, filter and optimizer.
        init_key: Of the parameters.
    """

    config: TrainConfig
    plan: RunPlan
    model: nn.Module
    chain: TrainingChain
    init_key: jax.Array

    def guarantee(self, opt_state: Any) -> dict[str, Any]:
        """Returns the guarantee of the run, from the ledger in the final state."""
        config, plan = self.config, self.plan
        epsilon = None
        if plan.promise is not None and plan.noise_multiplier > 0:
            epsilon = plan.promise.guarantee(opt_state).stated_epsilon
        recorded = ["training loss and accuracy"] if config.record_training_metrics else []
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
            "not_covered_by_epsilon": recorded,
            "assumed_secret": [] if epsilon is None or config.seed is None else ["config.seed"],
        }


def resolve(
    config: TrainConfig,
    plan: RunPlan,
    *,
    num_classes: int,
    keys: Keys | None = None,
) -> ResolvedRun:
    """Resolves a config within its plan.

    Args:
        config: The config.
        plan: From `make_plan`, of this config.
        num_classes: Of the data; 0 for labels of tokens.
        keys: That the steps begin with; None: those that follow from the run's seed.

    Raises:
        ConfigError: As for `build_model` and `build_chain`.
    """
    model = config.build_model(num_classes)
    init_key, own = seeds.keys(plan.seed, config.generator)
    chain = build_chain(config, plan.noise_multiplier, own if keys is None else keys)
    return ResolvedRun(config, plan, model, chain, init_key)
