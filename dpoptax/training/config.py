"""Defines the config of a training run and reads configs from Python files."""

import dataclasses
import fnmatch
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpoptax.training import config_files, named_configs
from dpoptax.training.data.dataset import DatasetSpec, Unit
from dpoptax.training.errors import ConfigError, line_in, unknown_name
from dpoptax.training.methods import DPSGD, Method
from dpoptax.training.roles import Numbers, Role, check, field

if TYPE_CHECKING:
    import flax.linen as nn
    import jax

    from dpoptax.training.models import Variables

Accountant = Literal["pld", "rdp", "monte_carlo"]
"""Copy of `dpoptax.accounting.Accountant`, whose import is slow."""

_COUNT = Numbers(lambda x: isinstance(x, int) and x >= 1, "a positive integer")
_SEED = Numbers(
    lambda x: isinstance(x, int) and 0 <= x < 2**256,
    "an integer from 0 to 2**63 - 1, or to 2**256 - 1 with generator='chacha20'",
)
_POSITIVE = Numbers(lambda x: 0 < x < math.inf, "positive and finite")
_CLIP_NORM = Numbers(
    _POSITIVE.valid,
    "positive and finite",
    " Use clip='auto_v' to scale all gradients to one norm, method=AdaptiveClip() to adapt the "
    "bound, or method=NonPrivate() to train without clipping.",
)
_FRACTION = Numbers(lambda x: 0 < x < 1, "strictly between 0 and 1")
_NOT_NEGATIVE = Numbers(lambda x: 0 <= x < math.inf, "finite and at least 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Configures a training run.

    With `noise_multiplier=None`, the noise is calibrated so that `steps` steps spend `epsilon` at
    `delta`. Otherwise `epsilon` is a budget, and a step that would exceed it does not run. With
    `epsilon=None`, the run has no budget and reports the spent ε.

    Raises:
        ConfigError: A field is out of range. The message names field, value and remedy.
    """

    method: Method = DPSGD()
    """Method: gradient points, and the filter of the noisy gradient."""

    dataset: str = "digits"
    """Name of a data set: digits, or one registered by the config file."""
    data_dir: Path | None = field(None, Role.CHANGEABLE)
    """Directory with the files of the data set, if it has files."""
    model: str = field("mlp", Role.UNPRICED)
    """Name of a model: linear, mlp, cnn, one registered by the config file, or MODULE:FUNCTION. The
    function maps the number of classes to a flax module or a FunctionModel."""

    records_per_user: int | None = field(None, numbers=_COUNT)
    """Maximum number of examples of a user in a step. If a user has more, each step draws some. The
    clip then applies to the gradient of the mean loss of a user's examples, batch and microbatch
    sizes count users, and ε protects a user with all of its examples. None: it protects one
    example."""

    steps: int = field(120, Role.CHANGEABLE, _COUNT)
    """Number of optimizer steps."""
    batch_size: int = field(256, Role.CHANGEABLE, _COUNT)
    """Expected number of examples per step. Every sum is divided by it."""
    microbatch_size: int | None = field(None, numbers=_COUNT)
    """Number of examples with gradients in memory at once. None: the whole batch."""
    optimizer: str = field("sgd", Role.UNPRICED)
    """Optimizer of the filtered gradient: sgd, momentum, adam, adamw (weight decay 0.01), or
    MODULE:FUNCTION. The function returns an optax transformation without a learning rate."""
    learning_rate: float = field(1.0, Role.UNPRICED, _POSITIVE)
    """Peak learning rate."""
    schedule: str = field("constant", Role.UNPRICED)
    """Schedule of the learning rate: constant, linear or cosine decay to zero, or warmup_cosine,
    which warms up over the first twentieth of the steps."""

    parameter_ema: float | None = field(None, Role.UNPRICED, _FRACTION)
    """Decay of a moving average of the parameters, in (0, 1), at most (1 + t)/(10 + t) at step t.
    The average is evaluated and saved instead of the parameters. None: no average."""

    epsilon: float | None = field(3.0, Role.CHANGEABLE, _POSITIVE)
    """Target ε of the calibration, and the privacy budget. None: no budget."""
    delta: float = field(1e-5, numbers=_FRACTION)
    """δ of (ε, δ)-differential privacy, well below 1 / number of examples."""
    noise_multiplier: float | None = field(None, Role.CHANGEABLE, _NOT_NEGATIVE)
    """Noise standard deviation relative to the clip norm. None: calibrated from epsilon."""
    fixed_point: bool = field(False, Role.UNPRICED)
    """Whether to add integer noise, so that ε holds against an adversary who sees every bit of the
    parameters. Sampling noise takes twice as long, and the noise is larger by some thousandths.
    Correlated noise then needs sampling="cyclic" or "in_order"."""
    clip: str = field("l2", Role.UNPRICED)
    """Geometry of the clip: l2, auto_s, auto_v, psac or normalized. per_layer, auto_s_per_layer and
    auto_v_per_layer split the bound evenly over the arrays of parameters. A method may override
    it."""
    l2_clip_norm: float = field(1.0, Role.UNPRICED, _CLIP_NORM)
    """Bound on the l2 norm of one example's gradient."""
    sampling: str = field("poisson", Role.CHANGEABLE)
    """Sampling of batches: poisson, fixed_size, balls_in_bins (each example in one batch of every
    epoch), random_allocation (each example in as many steps as there are epochs, anywhere in the
    run), min_separation (random, and never twice within the steps over which noise is correlated),
    cyclic (groups of examples take turns, for correlated noise), in_order (each group is a batch:
    data in a fixed order or used once, without amplification), or shuffled (no guarantee)."""
    accountant: Accountant = field("pld", Role.CHANGEABLE)
    """Accountant: privacy loss distributions (pld), Rényi divergences (rdp), or monte_carlo, which
    samples the privacy loss of the whole run, for correlated noise with random participation."""

    seed: int | None = field(None, Role.CHANGEABLE, _SEED)
    """Seed of the initial parameters, the batches and the noise. None: a fresh seed from the
    operating system, stored in the checkpoints only. Anyone who knows the seed can subtract the
    noise, and two runs with one seed reveal each other's noise. Set it only to repeat a study."""
    generator: Literal["threefry", "chacha20"] = field("threefry", Role.UNPRICED)
    """Generator of the noise: threefry, or chacha20 with batches drawn by SHAKE-256. With chacha20,
    the guarantee holds against adversaries who cannot break these ciphers, and sampling takes about
    four times as long. A seed from the operating system has 63 bits for threefry and 256 for
    chacha20."""
    checkpoint_every: int = field(100, Role.CHANGEABLE, _COUNT)
    """Steps between checkpoints. They contain the seed and the noise key."""
    parallel: Literal["none", "devices", "hosts"] = field("none", Role.CHANGEABLE)
    """Devices that share each batch: one device, all of this process, or all of several hosts."""
    eval_every: int = field(10, Role.CHANGEABLE, _COUNT)
    """Steps between evaluations on the test split."""

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigError(
                f"`method` must be a Method, got {self.method!r}. Pass an instance such as "
                "dpoptax.training.methods.DPSGD()."
            )
        check(self)
        stronger = self.fixed_point or self.generator == "chacha20"
        if stronger and (not self.method.private or self.method.unproven() is not None):
            raise ConfigError(
                "`method` must have a privacy guarantee for fixed_point=True and "
                f"generator='chacha20', got {self.method.name}. Omit both options."
            )
        if self.generator == "chacha20" and self.sampling == "min_separation":
            raise ConfigError(
                "`sampling` must not be 'min_separation' with generator='chacha20', because it "
                "cannot draw batches by SHAKE-256. Use generator='threefry' or "
                "sampling='balls_in_bins'."
            )
        if self.generator == "threefry" and self.seed is not None and self.seed >= 2**63:
            raise ConfigError(
                "`seed` must be below 2**63 with generator='threefry', whose keys have no more "
                "bits. Pass a smaller seed, or use generator='chacha20'."
            )
        if self.method.private and self.epsilon is None and self.noise_multiplier is None:
            raise ConfigError(
                "`epsilon` or `noise_multiplier` must be given for a private method, got None for "
                "both. Set `epsilon` to calibrate the noise, or set `noise_multiplier`."
            )

    @property
    def unit(self) -> Unit:
        """The unit of privacy: a user if `records_per_user` is given, else an example."""
        return "example" if self.records_per_user is None else "user"

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON values, for summary.json."""
        fields = {**dataclasses.asdict(self), "method": self.method.to_dict()}
        return {name: _plain(value) for name, value in fields.items()}

    # Subclasses with more fields override these methods to read other data or build other models.

    def data(self, *, progress: bool = False) -> DatasetSpec:
        """Returns the specification of the data. `progress` shows the progress of reading."""
        return DatasetSpec(self.dataset, self.data_dir, progress)

    def build_model(self, num_classes: int | None) -> "nn.Module":
        """Builds the flax module that `model` names."""
        from dpoptax.training import models  # flax takes a second to import

        return models.build_model(self.model, num_classes)

    def initial_variables(
        self, model: "nn.Module", inputs: "jax.Array", key: "jax.Array"
    ) -> "Variables":
        """Returns the initial variables, for inputs of one example."""
        from dpoptax.training import models

        return models.initial_variables(model, inputs, key)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def load_configs(path: str | Path) -> dict[str, TrainConfig]:
    """Reads the configs of a Python file, or of an installed name, by name.

    The file defines `get_config()`, for one run named like the file, or `get_configs()`, for
    several runs by name. `FILE:PATTERN` selects some of them, such as `table1.py:mnist/*`. If there
    is no such file, a name that `dpoptax configs` lists means an installed config or set.

    Raises:
        ConfigError: The file does not exist, raises an error, or defines no config that matches.
    """
    path, pattern = str(path), "*"
    if ":" in path and not Path(path).is_file():
        path, pattern = path.rsplit(":", 1)
    if not Path(path).is_file():
        if files := named_configs.find(path):
            return {name: c for file in files for name, c in load_configs(file).items()}
        raise ConfigError(
            f"`config` must be a Python file or an installed name, got {path!r}. Pass the path of "
            "an existing file, or a name that `dpoptax configs` lists."
        )
    defined: dict[str, Any] = {}
    try:
        defined = vars(config_files.load(path))
        one, several = defined.get("get_config"), defined.get("get_configs")
        found = {Path(path).stem: one()} if callable(one) else several() if several else None
    except Exception as error:  # the user's code can raise any error
        raise _raised_in(path, error, defined) from error
    if found is None:
        raise ConfigError(
            f"The config file {path} must define get_config() or get_configs(), got neither. "
            "Define get_config() and return a TrainConfig."
        )
    for config in found.values():
        if not isinstance(config, TrainConfig):
            kind = type(config).__name__
            raise ConfigError(
                f"The functions of the config file {path} must return a TrainConfig, got {kind}."
            )
    chosen = {name: found[name] for name in found if fnmatch.fnmatchcase(name, pattern)}
    if not chosen:
        raise unknown_name("config", pattern, found)
    return chosen


def _raised_in(path: str, error: Exception, defined: dict[str, Any]) -> ConfigError:
    """Returns the error for an exception in a config file."""
    where = f"Config file {path}{line_in(path, error)}"
    wrong = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    for kind in defined.values():
        if wrong and dataclasses.is_dataclass(kind) and getattr(kind, "__name__", "") == wrong[1]:
            names = (f.name for f in dataclasses.fields(kind) if f.init)
            return unknown_name(f"{where}: A field of {wrong[1]}", wrong[2], names)
    return ConfigError(f"{where}: {type(error).__name__}: {error}")


def load_config(path: str | Path) -> TrainConfig:
    """Reads a single config; see `load_configs`. A set's name means its baseline.

    Raises:
        ConfigError: As for `load_configs`, or `path` names several configs.
    """
    if str(path) in named_configs.SETS and not Path(path).is_file():
        path = named_configs.find(str(path))[0]
    configs = load_configs(path)
    if len(configs) > 1:
        raise ConfigError(
            f"`config` must name one run, got {len(configs)} runs in {path}. Pass one as "
            f"FILE:NAME, for example {path}:{next(iter(configs))}. `dpoptax plan {path}` lists all "
            "of them."
        )
    return next(iter(configs.values()))
