"""Defines methods with gradient points and filters after the noise of DP-SGD."""

import dataclasses
from typing import ClassVar

import optax

import dpoptax
from dpoptax.training.methods.method import Method
from dpoptax.training.roles import Role, field


@dataclasses.dataclass(frozen=True)
class Doppler(Method):
    """DP-SGD with a low-pass filter on the noisy gradient (Zhang et al., 2024)."""

    name: ClassVar[str] = "DOPPLER"

    preset: str = field("doppler-first-order-1", Role.UNPRICED)
    """Name of the filter; see dpoptax.filters.presets."""
    b: tuple[float, ...] = ()
    """Feed-forward coefficients b_0, b_1, ... of a custom filter, instead of the preset."""
    a: tuple[float, ...] = ()
    """Feedback coefficients a_1, a_2, ... of that filter, without a_0 = 1."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns the bias-corrected filter."""
        del stddev
        return dpoptax.doppler(*coefficients(self))


@dataclasses.dataclass(frozen=True)
class Disk(Method):
    """Look-ahead along the last step, and a Kalman filter (DiSK, 2024)."""

    name: ClassVar[str] = "DiSK"

    kappa: float = field(0.7, Role.UNPRICED)
    """Gain of predictor and filter, in (0, 1]. 1 is DP-SGD."""
    gamma: float | None = field(0.5, Role.UNPRICED)
    """Length of the look-ahead, in units of the last step. 0: the Hessian-vector product. None:
    (1 - kappa) / kappa, which needs one gradient per example instead of two."""
    filter_gain: float | None = field(None, Role.UNPRICED)
    """Gain of the filter alone, in (0, 1]. None: kappa. The code published with Opacus swaps the
    weights of the filter, which corresponds to 1 - kappa."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns the gradient points and the filter."""
        del stddev
        return dpoptax.disk(self.kappa, self.gamma, filter_gain=self.filter_gain)


@dataclasses.dataclass(frozen=True)
class PMLF(Method):
    """Per-example momentum over the last iterates, and a low-pass filter (DP-PMLF)."""

    name: ClassVar[str] = "DP-PMLF"

    length: int = 2
    """Number of iterates at which each example's gradient is taken."""
    beta: float = field(0.1, Role.UNPRICED)
    """Weight of each iterate relative to the next newer one, in [0, 1]."""
    preset: str = field("pmlf-mnist", Role.UNPRICED)
    """Name of the filter; see dpoptax.filters.presets."""
    b: tuple[float, ...] = ()
    """Feed-forward coefficients b_0, b_1, ... of a custom filter, instead of the preset."""
    a: tuple[float, ...] = ()
    """Feedback coefficients a_1, a_2, ... of that filter, without a_0 = 1."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns the gradient points and the bias-corrected filter."""
        del stddev
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
        """Returns the filter for this noise."""
        return dpoptax.adaptive_kalman(stddev, decay=self.decay, per_leaf=self.per_leaf)


def coefficients(method: Doppler | PMLF) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the coefficients of the method, or those of its preset."""
    if method.b or method.a:
        return method.b, method.a
    return dpoptax.filters.preset(method.preset)
