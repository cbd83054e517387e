"""The methods a config can name, and the optax chain that a config means."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import optax

import dpoptax
from dpoptax.training.errors import unknown_name
from dpoptax.training.recording import recorder

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

    def clip(self, l2_clip_norm: float) -> dpoptax.Clip | None:
        """Clip of a geometry of the method's own; None: the one that the config names."""
        return None

    def noise(self, **release: Any) -> optax.GradientTransformation:
        """The privacy boundary, from `noise_multiplier`, `batch_size` and `key`."""
        return dpoptax.gaussian_noise(**release)

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Gradient points and filter: what stands between the noise and the optimizer.

        `stddev` is the standard deviation of the noise in the gradient that it gets.
        """
        del stddev
        return optax.identity()

    def unproven(self) -> str | None:
        """Why no ε may be stated for the method, from its own ledger; None where one may."""
        if not self.private:
            return None
        noise = self.noise(noise_multiplier=1.0, batch_size=1, key=jax.random.key(0))
        reasons = [ledger.mechanism.unproven for ledger in dpoptax.ledgers(noise.init({}))]
        return next((reason for reason in reasons if reason is not None), None)

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
        return dpoptax.doppler(*coefficients(self))


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
        return dpoptax.pmlf(self.length, self.beta, *coefficients(self))


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


@dataclasses.dataclass(frozen=True)
class GeoDP(Method):
    """GeoDP as published: noise on magnitude and angles of the mean. It has no proven ε."""

    name: ClassVar[str] = "GeoDP"

    beta: float = 0.1
    """Factor of the noise on the angles, in (0, 1]."""

    def noise(self, **release: Any) -> optax.GradientTransformation:
        """Algorithm 1 of the paper, which `dpoptax.accounting` refuses."""
        return dpoptax.geodp(self.beta, **release)


@dataclasses.dataclass(frozen=True)
class HypersphericalClip(Method):
    """GeoDP with a proof: each example's magnitude and angles are bounded, then noised."""

    name: ClassVar[str] = "Hyperspherical"

    angle_norm: float = 2.0
    """Bound on the l2 norm of one example's angles from the equator, in radians."""
    magnitude_weight: float = 0.1
    """Share of the magnitude in the bounded vector, in (0, 1)."""

    def clip(self, l2_clip_norm: float) -> dpoptax.Clip:
        """The geometry, whatever clip the config names."""
        return dpoptax.hyperspherical_clip(
            l2_clip_norm, angle_norm=self.angle_norm, magnitude_weight=self.magnitude_weight
        )


def coefficients(method: Doppler | PMLF) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """b and a of a method's filter: its own, or those of its preset."""
    if method.b or method.a:
        return method.b, method.a
    return dpoptax.filters.preset(method.preset)


DIRECTIONS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": optax.identity,
    "momentum": lambda: optax.trace(decay=0.9),
    "adam": optax.scale_by_adam,
    "adamw": lambda: optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.01)),
}
"""Optimizers by name, without their learning rate."""

SCHEDULES: dict[str, Callable[[int], optax.Schedule]] = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "linear": lambda steps: optax.linear_schedule(1.0, 0.0, steps),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
    "warmup_cosine": lambda steps: optax.warmup_cosine_decay_schedule(
        0.0, 1.0, max(1, steps // 20), max(2, steps)
    ),
}
"""Course of the learning rate by name, as a fraction of the peak."""

CLIPS: dict[str, Callable[[float], dpoptax.Clip]] = {
    "l2": dpoptax.l2_clip,
    "auto_s": dpoptax.automatic_clip,
    "auto_v": lambda l2_clip_norm: dpoptax.automatic_clip(l2_clip_norm, gamma=0.0),
    "psac": dpoptax.psac_clip,
    "normalized": dpoptax.normalized_clip,
    "per_layer": dpoptax.per_layer_clip,
}
"""Clip geometries by name, from the clip norm."""


def build_clip(config: "TrainConfig") -> dpoptax.Clip:
    """The method's own clip, or the one that the config names."""
    if config.clip not in CLIPS:
        raise unknown_name("clip", config.clip, CLIPS)
    own = config.method.clip(config.l2_clip_norm)
    return CLIPS[config.clip](config.l2_clip_norm) if own is None else own


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
        stddev = noise_stddev(config, noise_multiplier)
        boundary = [
            config.method.noise(
                noise_multiplier=noise_multiplier, batch_size=config.batch_size, key=key
            )
        ]

    def record(stage: str) -> list[optax.GradientTransformation]:
        return [recorder(stage, config.steps, config.record)] if config.record else []

    return optax.chain(
        *boundary, *record("released"), config.method.filter(stddev), *record("filtered")
    )


def noise_stddev(config: "TrainConfig", noise_multiplier: float) -> float:
    """Standard deviation of the noise in each coordinate of a release; NaN where it has no one."""
    clip = build_clip(config)
    if clip.encodes or config.method.unproven() is not None:
        return math.nan  # the noise is on magnitude and angles
    return dpoptax.release_stddev(
        clip, noise_multiplier=noise_multiplier, batch_size=config.batch_size
    )
