"""Defines the base class of methods, DP-SGD and non-private training."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import optax

import dpoptax
from dpoptax.matrix import Strategy
from dpoptax.training.config_files import LOADED
from dpoptax.training.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Method:
    """Base class of methods. Use an instance of a subclass in a config.

    Attributes:
        name: Name in tables and figures.
        private: Whether gradients are clipped and noised.
        random: Whether the loss takes a key, which is new for each step.
        adaptive: Whether the clip norm follows a quantile, so that each release includes a count.
        cycle_length: With sampling="cyclic", the number of groups that take turns. With
            "min_separation", the number of steps in which an example takes part at most once.
    """

    name: ClassVar[str]
    private: ClassVar[bool] = True
    random: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    @property
    def cycle_length(self) -> int:
        """One group with all examples, in every step."""
        return 1

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss of one example, with a key as third argument if `random`."""
        return loss_fn

    def clip(self, l2_clip_norm: float) -> dpoptax.Clip | None:
        """Returns the method's clip. None: the clip that the config names."""
        return None

    def strategy(self, steps: int) -> Strategy | None:
        """Returns the strategy of correlated noise for a run. None: independent noise."""
        del steps
        return None

    def noise(self, clip: dpoptax.Clip, steps: int, **release: Any) -> optax.GradientTransformation:
        """Returns the noise stage for `noise_multiplier`, `batch_size` and `key`.

        Only a method without a proof, with a reason from `unproven`, may override it.

        Raises:
            ConfigError: The method is adaptive and has a strategy. The run would be priced for
                correlated noise and would add independent noise.
        """
        strategy = self.strategy(steps)
        if self.adaptive and strategy is not None:
            raise ConfigError(
                f"`method` must not be adaptive with correlated noise, got {self.name}. Return "
                "None from strategy(), or set `adaptive` to False."
            )
        if self.adaptive:
            return dpoptax.contrib.adaptive_gaussian_noise(cast(Any, clip), **release)
        if strategy is None:
            return dpoptax.gaussian_noise(**release)
        fixed_point = release.pop("fixed_point", False)
        return dpoptax.correlated_noise(
            strategy, fixed_point_clip=clip if fixed_point else None, **release
        )

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns gradient points and filter, between noise and optimizer.

        `stddev` is the standard deviation of the noise in its input.
        """
        del stddev
        return optax.identity()

    def direction(self, stddev: float) -> optax.GradientTransformation | None:
        """Returns the method's optimizer without learning rate. None: the config's."""
        del stddev
        return None

    def unproven(self) -> str | None:
        """Returns the reason why no ε holds, or None for a method with a proof."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns name and fields as plain values, and the class if it is not dpoptax's.

        A class is identified by its module and qualified name. The module of a config file is the
        name of the file without suffix. Changes to the code of the class are not detected.
        """
        kind: type = type(self)
        module = kind.__module__
        if module in LOADED:
            module = Path(LOADED[module][0]).stem
        own = kind.__module__.partition(".")[0] == "dpoptax"
        known = {} if own else {"class": f"{module}.{kind.__qualname__}"}
        return {"name": self.name, **known, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class NonPrivate(Method):
    """Training without clip, noise and guarantee, as an upper baseline for accuracy."""

    name: ClassVar[str] = "Non-private"
    private: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class DPSGD(Method):
    """Clipped gradients and Gaussian noise without a filter (Abadi et al., 2016)."""

    name: ClassVar[str] = "DP-SGD"
