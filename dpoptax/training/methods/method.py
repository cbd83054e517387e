"""Defines the base of methods, and the two methods without a filter."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import optax

import dpoptax
from dpoptax.matrix import Strategy
from dpoptax.training.config_files import LOADED


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of the methods. To add one, subclass it and use an instance in a config.

    Attributes:
        name: How tables and figures call it.
        private: Whether gradients are clipped and noised.
        random: Whether the loss takes a key, a new one each step.
        adaptive: Whether its clip follows a quantile, so that each release holds a count.
        cycle_length: Number of groups that take turns where a config's sampling is "cyclic", and
            of steps in which an example takes part but once where it is "min_separation".
    """

    name: ClassVar[str]
    private: ClassVar[bool] = True
    random: ClassVar[bool] = False
    adaptive: ClassVar[bool] = False

    @property
    def cycle_length(self) -> int:
        """One group: all examples, at every step."""
        return 1

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss of one example: `loss_fn(params, example)`, or with a key."""
        return loss_fn

    def clip(self, l2_clip_norm: float) -> dpoptax.Clip | None:
        """Returns the method's clip. None: the one that the config names."""
        return None

    def strategy(self, steps: int) -> Strategy | None:
        """Returns the strategy of correlated noise for a run. None: independent noise."""
        del steps
        return None

    def noise(self, clip: dpoptax.Clip, steps: int, **release: Any) -> optax.GradientTransformation:
        """Returns the noise stage, from `noise_multiplier`, `batch_size` and `key`.

        Only a method with a reason in `unproven` may have other noise, which no ε holds for.
        """
        if self.adaptive:
            return dpoptax.adaptive_gaussian_noise(cast(Any, clip), **release)
        strategy = self.strategy(steps)
        if strategy is None:
            return dpoptax.gaussian_noise(**release)
        fixed_point = release.pop("fixed_point", False)
        return dpoptax.correlated_noise(
            strategy, fixed_point_clip=clip if fixed_point else None, **release
        )

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns gradient points and filter, between the noise and the optimizer.

        `stddev` is the standard deviation of the noise in its input.
        """
        del stddev
        return optax.identity()

    def direction(self, stddev: float) -> optax.GradientTransformation | None:
        """Returns the method's optimizer without learning rate. None: the config's."""
        del stddev
        return None

    def unproven(self) -> str | None:
        """Returns the reason why no ε may be stated. None: one may be stated."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Returns name and fields as plain values, with the class where it is not dpoptax's own.

        A class is identified by its module and qualified name. The module of a config file is the
        file's name without its suffix. Edits of the class's code are not noticed.
        """
        kind: type = type(self)
        module = kind.__module__
        if module in LOADED:
            module = Path(LOADED[module].path).stem
        own = kind.__module__.partition(".")[0] == "dpoptax"
        known = {} if own else {"class": f"{module}.{kind.__qualname__}"}
        return {"name": self.name, **known, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class NonPrivate(Method):
    """Trains without clip, noise and guarantee, as a bound on accuracy."""

    name: ClassVar[str] = "Non-private"
    private: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class DPSGD(Method):
    """Clipped gradients and Gaussian noise, no filter (Abadi et al., 2016)."""

    name: ClassVar[str] = "DP-SGD"
