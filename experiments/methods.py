"""Defines the methods of experiments: loss, noise, filter and optimizer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import optax
import optax.contrib

import dpoptax
from dpoptax.matrix import Strategy, optimal_banded_toeplitz
from dpoptax.training import ConfigError
from experiments.augmentations import flipped, shifted

_OPTIMAL_STRATEGY = functools.cache(optimal_banded_toeplitz)


@dataclasses.dataclass(frozen=True)
class Method:
    """Base class of methods. Use an instance of a subclass in a config.

    Attributes:
        name: Name in tables and figures.
        private: Whether gradients are clipped and noised.
        cycle_length: With sampling="cyclic", the number of groups that take turns.
    """

    name: ClassVar[str]
    private: ClassVar[bool] = True

    @property
    def cycle_length(self) -> int:
        """One group with all examples, in every step."""
        return 1

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the loss of one example, which may take a key, new for each step."""
        return loss_fn

    def strategy(self, steps: int) -> Strategy | None:
        """Returns the strategy of correlated noise for a run. None: independent noise."""
        del steps
        return None

    def noise(self, **release: Any) -> optax.GradientTransformation | None:
        """Returns the noise stage of a method without a proof, or None for that of the plan."""
        del release
        return None

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


@dataclasses.dataclass(frozen=True)
class NonPrivate(Method):
    """Training without clip, noise and guarantee, as an upper baseline for accuracy."""

    name: ClassVar[str] = "Non-private"
    private: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class DPSGD(Method):
    """Clipped gradients and Gaussian noise without a filter (Abadi et al., 2016)."""

    name: ClassVar[str] = "DP-SGD"


@dataclasses.dataclass(frozen=True)
class Doppler(Method):
    """DP-SGD with a low-pass filter on the noisy gradient (Zhang et al., 2024)."""

    name: ClassVar[str] = "DOPPLER"

    preset: str = "doppler-first-order-1"
    """Name of the filter; see dpoptax.filters.presets."""
    b: tuple[float, ...] = ()
    """Feed-forward coefficients b_0, b_1, ... of a custom filter, instead of the preset."""
    a: tuple[float, ...] = ()
    """Feedback coefficients a_1, a_2, ... of that filter, without a_0 = 1."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        return dpoptax.doppler(*coefficients(self))


@dataclasses.dataclass(frozen=True)
class Disk(Method):
    """Look-ahead along the last step, and a Kalman filter (DiSK, 2024)."""

    name: ClassVar[str] = "DiSK"

    kappa: float = 0.7
    """Gain of predictor and filter, in (0, 1]. 1 is DP-SGD."""
    gamma: float | None = 0.5
    """Length of the look-ahead, in units of the last step. None: (1 - kappa) / kappa, which needs
    one gradient per example instead of two."""
    filter_gain: float | None = None
    """Gain of the filter alone, in (0, 1]. None: kappa. The code published with Opacus swaps the
    weights of the filter, which corresponds to 1 - kappa."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        return dpoptax.disk(self.kappa, self.gamma, filter_gain=self.filter_gain)


@dataclasses.dataclass(frozen=True)
class PMLF(Method):
    """Per-example momentum over the last iterates, and a low-pass filter (DP-PMLF)."""

    name: ClassVar[str] = "DP-PMLF"

    length: int = 2
    """Number of iterates at which each example's gradient is taken."""
    beta: float = 0.1
    """Weight of each iterate relative to the next newer one, in [0, 1]."""
    preset: str = "pmlf-mnist"
    """Name of the filter; see dpoptax.filters.presets."""
    b: tuple[float, ...] = ()
    """Feed-forward coefficients b_0, b_1, ... of a custom filter, instead of the preset."""
    a: tuple[float, ...] = ()
    """Feedback coefficients a_1, a_2, ... of that filter, without a_0 = 1."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        return dpoptax.pmlf(self.length, self.beta, *coefficients(self))


@dataclasses.dataclass(frozen=True)
class AdaptiveKalman(Method):
    """Kalman filter with a gain estimated from released gradients and the known noise."""

    name: ClassVar[str] = "Adaptive Kalman"

    decay: float = 0.95
    """Decay of the running mean that estimates the drift of the gradient, in [0, 1)."""
    per_leaf: bool = False
    """Whether each array of parameters has its own gain."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        return dpoptax.adaptive_kalman(stddev, decay=self.decay, per_leaf=self.per_leaf)


def coefficients(method: Doppler | PMLF) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the coefficients of the method, or those of its preset."""
    if method.b or method.a:
        return method.b, method.a
    return dpoptax.filters.preset(method.preset)


@dataclasses.dataclass(frozen=True)
class CorrelatedNoise(Doppler):
    """Correlated noise, which later steps partly cancel, followed by DOPPLER's filter.

    It needs `sampling="cyclic"`, with as many groups as bands, "in_order", with at least as many
    batches per epoch as bands, or "balls_in_bins", with at least four times as many.
    """

    name: ClassVar[str] = "Correlated noise"

    preset: str = "none"
    """Name of the filter, see dpoptax.filters.presets."""
    bands: int = 4
    """Number of successive steps over which noise is correlated. 1: independent noise."""

    @property
    def cycle_length(self) -> int:
        return self.bands

    def strategy(self, steps: int) -> Strategy:
        try:
            return _OPTIMAL_STRATEGY(steps, min(self.bands, steps))
        except ImportError as error:
            raise ConfigError(f"method={self.name} needs an optional package. {error}") from error


@dataclasses.dataclass(frozen=True)
class LPAdam(Doppler):
    """Adam with DOPPLER's filter as first moment (Zhang et al., 2024, Algorithm 3)."""

    name: ClassVar[str] = "LP-Adam"

    b2: float = 0.999
    """Decay of the second moment of the unfiltered gradient, in [0, 1)."""
    noise_corrected: bool = False
    """Whether to subtract the noise variance from the second moment, as DP-AdamBC does."""
    rank: int | None = None
    """Rank of GaLore's projection of each matrix. None: no projection."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        return optax.identity()

    def direction(self, stddev: float) -> optax.GradientTransformation:
        known = stddev if self.noise_corrected else 0.0
        adam = dpoptax.extend.scale_by_lp_adam(*coefficients(self), b2=self.b2, stddev=known)
        if self.rank is None:
            return adam
        return optax.contrib.scale_by_galore(self.rank, base_optimizer=adam)


@dataclasses.dataclass(frozen=True)
class GeoDP(Method):
    """GeoDP as published: noise on magnitude and angles of the mean, without proof."""

    name: ClassVar[str] = "GeoDP"

    beta: float = 0.1
    """Factor of the noise on the angles, in (0, 1]."""

    def noise(self, **release: Any) -> optax.GradientTransformation:
        return dpoptax.contrib.geodp(self.beta, **release)

    def unproven(self) -> str:
        # Imported here, as `dpoptax` does, because configs need no contributed methods.
        from dpoptax.contrib._geodp import UNPROVEN

        return UNPROVEN


@dataclasses.dataclass(frozen=True)
class Augmented(Method):
    """Clipped mean gradients over augmented copies of each example (De et al., 2022).

    Copies are shifted and optionally flipped. Inputs must be images.
    """

    name: ClassVar[str] = "Augmented"

    multiplicity: int = 4
    """Number of copies. Each costs one gradient."""
    shift: int = 1
    """Maximum shift of a copy along each axis, in pixels."""
    mirrored: bool = False
    """Whether shifts fill the border with the mirrored image instead of zeros."""
    flip: bool = False
    """Whether to mirror each copy left to right with probability 1/2."""

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        augment = shifted(self.shift, mirrored=self.mirrored)
        if self.flip:
            augment = flipped(augment)
        return dpoptax.augmented(loss_fn, augment, self.multiplicity)


@dataclasses.dataclass(frozen=True)
class InnerOuter(Method):
    """Per-example momentum and outer momentum, neither normalized (Xiao et al., 2023)."""

    name: ClassVar[str] = "Inner-outer"

    length: int = 2
    """Number of iterates at which each example's gradient is taken."""
    beta: float = 0.1
    """Inner momentum, in [0, 1]."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        return dpoptax.contrib.inner_outer(self.length, self.beta, self.momentum)


@dataclasses.dataclass(frozen=True)
class AugmentedDisk(Augmented, Disk):
    """DiSK on gradients that are means over copies, the same copies at both points."""

    name: ClassVar[str] = "DiSK, augmented"


@dataclasses.dataclass(frozen=True)
class AdamBC(Method):
    """Adam with a noise-corrected second moment (DP-AdamBC, Tang et al., 2024)."""

    name: ClassVar[str] = "DP-AdamBC"

    b1: float = 0.9
    """Decay of the first moment, in [0, 1)."""
    b2: float = 0.999
    """Decay of the second moment, in [0, 1)."""
    eps: float | None = None
    """Smallest denominator. None: the level of the second moment from noise alone."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        momentum = (1.0 - self.b1,), (-self.b1,)
        return dpoptax.extend.scale_by_lp_adam(*momentum, b2=self.b2, eps=self.eps, stddev=stddev)


@dataclasses.dataclass(frozen=True)
class SignSGD(Method):
    """The sign of each coordinate of the noisy gradient or its momentum (DP-SignSGD)."""

    name: ClassVar[str] = "DP-SignSGD"

    decay: float = 0.0
    """Decay of the momentum before the sign, in [0, 1)."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        return optax.chain(optax.ema(self.decay), optax.scale_by_sign())


@dataclasses.dataclass(frozen=True)
class NormalizedSteps(Method):
    """Steps of one length, in the direction of the noisy gradient or its running mean."""

    name: ClassVar[str] = "Normalized steps"

    decay: float = 0.0
    """Decay of the running mean before the normalization, in [0, 1)."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        return optax.chain(optax.ema(self.decay), optax.normalize_by_update_norm())
