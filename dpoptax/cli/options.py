"""Options of the commands that read one config."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from dpoptax.training.config import Accountant, TrainConfig


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
class SuggestArguments:
    """Options of `dpoptax plan --suggest`."""

    dataset_size: int
    """Number of examples, or of users; by default the config's."""
    epsilon: float
    """ε of the run; by default the config's."""
    delta: float
    """δ of the run; by default the config's."""
    examples: float | None = None
    """Compute budget in examples: batch size times steps; by default the config's."""
    flops: float | None = None
    """Compute budget in floating-point operations, instead of examples."""
    flops_per_example: float | None = None
    """Operations for one example; by default those of the config's traced step."""
    params: float | None = None
    """Number of parameters of a transformer: 6 operations for each and for each token."""
    tokens: float = 1
    """Tokens of an example, with --params."""
    min_steps: int = 100
    """Fewest steps that finish the training."""
    max_excess: float = 0.1
    """Fraction of noise above the limit that is not worth a larger batch."""
    accountant: Accountant = "rdp"
    """Prices the options; "pld" takes minutes."""
    figure: Path | None = None
    """PNG file for the curve."""


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
