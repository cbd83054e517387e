"""Options of the commands that train many runs."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from dpoptax.training.config import Config
from dpoptax.training.search.comparison import Comparison
from dpoptax.training.search.price import Sweep


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Configs:
    configs: tyro.conf.Positional[tuple[Path, ...]]
    """Python files, FILE:NAME, or installed names such as `digits`."""
    data_dir: Path | None = None
    """The argument `data_dir` of every config. None: the configs' own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareArguments(_Configs):
    """Options of `dpoptax compare`."""

    comparison: Annotated[Comparison, tyro.conf.arg(name="")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepArguments(_Configs):
    """Options of `dpoptax sweep`."""

    sweep: Annotated[Sweep, tyro.conf.arg(name="")]
    dry_run: bool = False
    """Only print the privacy cost of the result."""


def with_data(configs: dict[str, Config], given: _Configs) -> dict[str, Config]:
    """Returns the configs with the data directory of the options, if given."""
    if given.data_dir is None:
        return configs
    return {name: config.replace(data_dir=given.data_dir) for name, config in configs.items()}
