"""What each command takes on the command line, and the data that its configs read."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import tyro

from dpoptax.training.config import TrainConfig
from dpoptax.training.data import fetching


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Of all commands that read data."""

    fetch: bool = False
    """Fetch the published files of the data set into --data-dir, if some are not there."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments(Data):
    """Of `dpoptax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    workdir: Path
    """Directory for metrics.jsonl, summary.json, params.msgpack, training.png, checkpoints/, and
    generated.jsonl with --beams; the same command goes on with a run that was stopped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments(Data):
    """Of `dpoptax plan`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    compile: bool = False
    """Also compile the step, which can take minutes, for the working memory that it needs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditArguments(Data):
    """Of `dpoptax audit`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    trials: int = 20_000
    """Training runs with the attacker's example, and as many without."""
    confidence: float = 0.999
    """Of each bound."""
    attack_seed: int = 0
    """Seed of the attack; not of the training."""
    figure: Path = Path("runs/audit.png")
    """File for the figure of errors, claimed and audited."""


def fetch_for(configs: Iterable[TrainConfig], wanted: bool) -> None:
    """Fetches what `configs` lack of their data sets, if that is `wanted`; see `fetching.fetch`."""
    if wanted:
        for name, data_dir in dict.fromkeys((c.dataset, c.data_dir) for c in configs):
            fetching.fetch(name, data_dir)
