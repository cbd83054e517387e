"""The methods a config can name, and the optax chain that a config means."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import optax

import dpoptax
from dpoptax.training.errors import unknown_name

if TYPE_CHECKING:
    from dpoptax.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Method:
    """Base of the methods. To add one, subclass it and use an instance in a config.

    Attributes:
        name: How tables and figures call it.
        private: Whether gradients are clipped and noised.
    """

    name: ClassVar[str]
    private: ClassVar[bool] = True

    def clip(self, l2_clip_norm: float) -> Any:
        """Geometry of the clip of each example's gradient."""
        return dpoptax.l2_clip(l2_clip_norm)

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Gradient points and filter: what stands between the noise and the optimizer.

        `stddev` is the standard deviation of the noise in the gradient that it gets.
        """
        del stddev
        return optax.identity()

    def to_dict(self) -> dict[str, Any]:
        """Name and parameters as plain values."""
        return {"name": self.name, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class NonPrivate(Method):
    """No clip, no noise, no guarantee: what the model reaches without privacy."""

    name: ClassVar[str] = "Non-private"
    private: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class DPSGD(Method):
    """Clipped gradients and Gaussian noise, no filter (Abadi et al., 2016)."""

    name: ClassVar[str] = "DP-SGD"


@dataclasses.dataclass(frozen=True)
class Doppler(Method):
    """DP-SGD with a low-pass filter on the noisy gradient (Zhang et al., 2024)."""

    name: ClassVar[str] = "DOPPLER"

    preset: str = "doppler-first-order-1"
    """Name of the filter, see dpoptax.filters.presets."""
    b: tuple[float, ...] = ()
    """Feed-forward coefficients b_0, b_1, ... of a filter of your own, instead of the preset."""
    a: tuple[float, ...] = ()
    """Its feedback coefficients a_1, a_2, ... (a_0 = 1 is left out)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """The bias-corrected filter."""
        del stddev
        return dpoptax.doppler(*_coefficients(self))


@dataclasses.dataclass(frozen=True)
class Disk(Method):
    """A look-ahead along the last step, and a Kalman filter on the noisy gradient (DiSK, 2024)."""

    name: ClassVar[str] = "DiSK"

    kappa: float = 0.7
    """Gain of the filter, in (0, 1]; 1 is DP-SGD."""
    gamma: float | None = 0.5
    """Length of the look-ahead in units of the last step; 0 takes the Hessian-vector product, None
    is (1 - kappa) / kappa, which needs one gradient per example instead of two."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Its gradient points and its filter."""
        del stddev
        return dpoptax.disk(self.kappa, self.gamma)


@dataclasses.dataclass(frozen=True)
class PMLF(Method):
    """Per-example momentum over the last iterates, and a low-pass filter (DP-PMLF)."""

    name: ClassVar[str] = "DP-PMLF"

    length: int = 2
    """Number of iterates at which each example's gradient is taken."""
    beta: float = 0.1
    """Weight of each iterate relative to the next newer one, in [0, 1]."""
    preset: str = "pmlf-mnist"
    """Name of the filter, see dpoptax.filters.presets."""
    b: tuple[float, ...] = ()
    """Feed-forward coefficients b_0, b_1, ... of a filter of your own, instead of the preset."""
    a: tuple[float, ...] = ()
    """Its feedback coefficients a_1, a_2, ... (a_0 = 1 is left out)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Its gradient points and its bias-corrected filter."""
        del stddev
        return dpoptax.pmlf(self.length, self.beta, *_coefficients(self))


@dataclasses.dataclass(frozen=True)
class InnerOuter(Method):
    """Per-example momentum and outer momentum, neither normalised (Xiao et al., 2023)."""

    name: ClassVar[str] = "Inner-outer"

    length: int = 2
    """Number of iterates at which each example's gradient is taken."""
    beta: float = 0.1
    """Inner momentum, in [0, 1]."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Its gradient points and its momentum."""
        del stddev
        return dpoptax.inner_outer(self.length, self.beta, self.momentum)


@dataclasses.dataclass(frozen=True)
class AdaptiveKalman(Method):
    """A Kalman filter that finds its gain from the released gradients and the known noise."""

    name: ClassVar[str] = "Adaptive Kalman"

    decay: float = 0.95
    """Of the running mean that estimates the gradient's drift, in [0, 1)."""
    per_leaf: bool = False
    """Whether every array of parameters has a gain of its own."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """The filter, told the noise."""
        return dpoptax.adaptive_kalman(stddev, decay=self.decay, per_leaf=self.per_leaf)


@dataclasses.dataclass(frozen=True)
class AdaptiveFir(Method):
    """DOPPLER's finite filter, its coefficients estimated from the released gradients."""

    name: ClassVar[str] = "Adaptive FIR"

    length: int = 4
    """Number of coefficients, at least 2."""
    decay: float = 0.95
    """Of the running means that estimate the gradients' correlation, in [0, 1)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """The filter, told the noise."""
        return dpoptax.adaptive_fir(self.length, stddev, decay=self.decay)


def _coefficients(method: Doppler | PMLF) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if method.b or method.a:
        return method.b, method.a
    return dpoptax.filters.preset(method.preset)


DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": optax.identity,
    "momentum": lambda: optax.trace(decay=0.9),
    "adam": optax.scale_by_adam,
}
"""Optimizers by name, without their learning rate."""

SCHEDULES: dict[str, Callable[[int], optax.Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
}
"""Course of the learning rate by name, as a fraction of the peak."""


def build_optimizer(
    config: "TrainConfig", noise_multiplier: float, key: jax.Array
) -> optax.GradientTransformation:
    """The chain noise, filter, direction, learning rate.

    The learning rate is part of the state, the key too: runs that differ in these two alone share
    one compiled step.
    """
    if config.optimizer not in DIRECTIONS:
        raise unknown_name("optimizer", config.optimizer, DIRECTIONS)
    if config.schedule not in SCHEDULES:
        raise unknown_name("schedule", config.schedule, SCHEDULES)
    return optax.chain(
        build_release(config, noise_multiplier, key),
        DIRECTIONS[config.optimizer](),
        optax.scale_by_schedule(SCHEDULES[config.schedule](config.steps)),
        optax.inject_hyperparams(optax.scale_by_learning_rate)(config.learning_rate),
    )


def build_release(
    config: "TrainConfig", noise_multiplier: float, key: jax.Array
) -> optax.GradientTransformation:
    """The chain noise, filter: what becomes public of each step."""
    boundary, stddev = [], 0.0
    if config.method.private:
        clip = config.method.clip(config.l2_clip_norm)
        stddev = dpoptax.release_stddev(
            clip, noise_multiplier=noise_multiplier, batch_size=config.batch_size
        )
        boundary = [
            dpoptax.gaussian_noise(
                noise_multiplier=noise_multiplier, batch_size=config.batch_size, key=key
            )
        ]
    return optax.chain(*boundary, config.method.filter(stddev))
