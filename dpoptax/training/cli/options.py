"""Options of the commands, and the flags of configs."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

import dpoptax
from dpoptax.runs import Generator
from dpoptax.training.config import Config, load_configs
from dpoptax.training.errors import ConfigError
from dpoptax.training.run import files
from dpoptax.training.search.comparison import Comparison
from dpoptax.training.search.price import Sweep

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `dpoptax train`."""

    workdir: Path
    """Directory for metrics.jsonl, summary.json, statement.txt, params.msgpack, training.png and
    checkpoints/. The same command resumes an interrupted run."""
    parallel: Literal["none", "devices", "hosts"] = "none"
    """Devices that share each batch: one device, all of this process, or all of several hosts."""
    generator: Generator | None = None
    """Generator of the noise: threefry (the default of a new run), or chacha20 with batches drawn
    by SHAKE-256. With chacha20, the guarantee holds against adversaries who cannot break these
    ciphers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """Options of `dpoptax audit`."""

    trials: int = 20_000
    """Number of training runs with the attacked example, and of runs without it."""
    confidence: float = 0.999
    """Confidence of each bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """No options besides the flags of the config."""


def parse(
    config: Config, options: type[Options], arguments: Sequence[str], *, prog: str, description: str
) -> tuple[Config, Options]:
    """Reads the flags of a config and the options of a command.

    Args:
        config: The config. Each argument of its function is a flag.
        options: The dataclass of the command's options.
        arguments: The command line after the config.
        prog: Name of the command for messages.
        description: First line of the help.
    """
    flags = config.flags
    fields = [
        (
            name,
            Annotated[flag.kind, tyro.conf.arg(help=flag.text or None)],
            dataclasses.field(default=flag.default),
        )
        for name, flag in flags.items()
    ]
    flat: Any = tyro.conf.arg(name="")
    both = dataclasses.make_dataclass(
        "Arguments",
        [
            ("options", Annotated[options, flat]),
            ("flags", Annotated[dataclasses.make_dataclass("Flags", fields), flat]),
        ],
    )
    given: Any = tyro.cli(both, args=list(arguments), prog=prog, description=description)
    values = {name: getattr(given.flags, name) for name in flags}
    changed = {name: x for name, x in values.items() if x != flags[name].default}
    return config.replace(**changed), given.options


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriceArguments:
    """Options of `dpoptax plan` without a config."""

    dataset_size: int
    """Number of examples."""
    batch_size: int
    """Expected number of examples in a batch."""
    epochs: float | None = None
    """Expected number of times that each example is drawn."""
    steps: int | None = None
    """Number of steps, instead of epochs."""
    epsilon: float | None = None
    """ε of the run, which determines the noise."""
    noise_multiplier: float | None = None
    """Noise relative to the clipping bound, instead of epsilon."""
    delta: float | None = None
    """δ of the run, well below 1/N."""
    sampling: Literal["poisson", "fixed_size", "balls_in_bins"] = "poisson"
    """Sampling of batches: independent draws, a fixed size, or each example once per epoch."""

    def plan(self) -> "dpoptax.PrivacyPlan":
        """Returns the plan.

        Raises:
            ValueError: A number is missing, given twice or out of range.
        """
        samplers: dict[str, Any] = {
            "poisson": dpoptax.sampling.PoissonSampler,
            "fixed_size": dpoptax.sampling.FixedSizeSampler,
            "balls_in_bins": dpoptax.sampling.RandomAllocationSampler,
        }
        given = vars(self) | {"steps": self._number_of_steps()}
        del given["epochs"]
        return dpoptax.PrivacyPlan(sampler=samplers[given.pop("sampling")], **given)

    def _number_of_steps(self) -> int:
        files.check_count("batch_size", self.batch_size)
        if self.steps is not None and self.epochs is None:
            return self.steps
        if self.epochs is None or self.steps is not None:
            raise ConfigError("Exactly one of --epochs and --steps must be given.")
        if not 0 < self.epochs < math.inf:
            raise ConfigError(f"`epochs` must be positive and finite, got {self.epochs}.")
        return max(1, round(self.epochs * self.dataset_size / self.batch_size))


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
    """Compute budget in floating-point operations, as counted in the config's traced step."""


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


def configs_by_name(paths: Sequence[Path]) -> dict[str, Config]:
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
