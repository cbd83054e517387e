"""Options of the commands that read one config."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from dpoptax.training.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Options of `dpoptax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    workdir: Path
    """Directory for metrics.jsonl, summary.json, params.msgpack, training.png and checkpoints/.
    The same command goes on with a run that was stopped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments:
    """Options of `dpoptax plan`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    compile: bool = False
    """Also compile the step, which can take minutes, for the working memory that it needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditArguments:
    """Options of `dpoptax audit`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    trials: int = 20_000
    """Training runs with the attacker's example, and as many without."""
    confidence: float = 0.999
    """Confidence of each bound."""
    attack_seed: int = 0
    """Seed of the attack; not of the training."""
