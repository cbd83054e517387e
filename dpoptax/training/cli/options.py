"""Options of the commands that read one config, and configs by name."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dpoptax.training.config import TrainConfig, load_configs
from dpoptax.training.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """Options of `dpoptax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    workdir: Path
    """Directory for metrics.jsonl, summary.json, statement.txt, params.msgpack, training.png and
    checkpoints/. The same command resumes an interrupted run."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuggestArguments:
    """Options of `dpoptax plan --suggest`."""

    dataset_size: int
    """Number of examples or users; by default the config's."""
    epsilon: float
    """ε of the run; by default the config's."""
    delta: float
    """δ of the run; by default the config's."""
    examples: float | None = None
    """Compute budget in examples, batch size times steps; by default the config's."""
    flops: float | None = None
    """Compute budget in floating-point operations, instead of examples."""
    params: float | None = None
    """Number of parameters of a transformer, with 6 operations per parameter and token; by default,
    the operations of the config's traced step count."""
    tokens: float = 1
    """Number of tokens per example, for --params."""
    figure: Path | None = None
    """PNG file for a figure of the options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditArguments:
    """Options of `dpoptax audit`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    trials: int = 20_000
    """Number of training runs with the attacked example, and of runs without it."""
    confidence: float = 0.999
    """Confidence of each bound."""


def configs_by_name(paths: Sequence[Path]) -> dict[str, TrainConfig]:
    """Reads the configs of all paths by name, with the path if several share a name."""
    if not paths:
        raise ConfigError(
            "`configs` must name at least one config, got none. Pass the path of a config file."
        )
    loaded = [(str(path), load_configs(path)) for path in paths]
    names = [name for _, configs in loaded for name in configs]
    given = {
        name if names.count(name) == 1 else f"{path}:{name}": config
        for path, configs in loaded
        for name, config in configs.items()
    }
    if len(given) < len(names):
        raise ConfigError(f"`configs` must name each config once, got {', '.join(names)}.")
    return given
