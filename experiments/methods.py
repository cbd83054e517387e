"""Configures methods of `dpoptax.contrib`, and DiSK on augmented examples."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import optax

import dpoptax
from dpoptax.training.methods import Disk, Method
from dpoptax.training.roles import Role, field
from experiments.augmentations import flipped, shifted


@dataclasses.dataclass(frozen=True)
class GeoDP(Method):
    """GeoDP as published: noise on magnitude and angles of the mean, without proof."""

    name: ClassVar[str] = "GeoDP"

    beta: float = field(0.1, Role.UNPRICED)
    """Factor of the noise on the angles, in (0, 1]."""

    def noise(self, clip: dpoptax.Clip, steps: int, **release: Any) -> optax.GradientTransformation:
        """Returns Algorithm 1 of the paper, which `dpoptax.accounting` rejects."""
        del clip, steps
        return dpoptax.contrib.geodp(self.beta, **release)

    def unproven(self) -> str:
        """Returns the reason that is also in its ledger."""
        # Imported here, as `dpoptax` does, because configs need no contributed methods.
        from dpoptax.contrib._geodp import UNPROVEN

        return UNPROVEN


@dataclasses.dataclass(frozen=True)
class Augmented(Method):
    """Clipped mean gradients over augmented copies of each example (De et al., 2022).

    Copies are shifted and optionally flipped. Inputs must be images.
    """

    name: ClassVar[str] = "Augmented"
    random: ClassVar[bool] = True

    multiplicity: int = 4
    """Number of copies. Each costs one gradient."""
    shift: int = 1
    """Maximum shift of a copy along each axis, in pixels."""
    mirrored: bool = False
    """Whether shifts fill the border with the mirrored image instead of zeros."""
    flip: bool = False
    """Whether to mirror each copy left to right with probability 1/2."""

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the mean loss over the copies."""
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
    beta: float = field(0.1, Role.UNPRICED)
    """Inner momentum, in [0, 1]."""
    momentum: float = field(0.9, Role.UNPRICED)
    """Outer momentum, in [0, 1)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns the gradient points and the momentum."""
        del stddev
        return dpoptax.contrib.inner_outer(self.length, self.beta, self.momentum)


@dataclasses.dataclass(frozen=True)
class AdaptiveFir(Method):
    """DOPPLER's FIR filter with coefficients estimated from the released gradients."""

    name: ClassVar[str] = "Adaptive FIR"

    length: int = 4
    """Number of coefficients, at least 2."""
    decay: float = 0.95
    """Decay of the running means that estimate the gradients' correlation, in [0, 1)."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """Returns the filter, which uses the noise's standard deviation."""
        return dpoptax.contrib.adaptive_fir(self.length, stddev, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class HypersphericalClip(Method):
    """GeoDP with a proof: noise on the bounded magnitude and angles of each example."""

    name: ClassVar[str] = "Hyperspherical"

    angle_norm: float = 2.0
    """Bound on the l2 norm of one example's angles from the equator, in radians."""
    magnitude_weight: float = 0.1
    """Share of the magnitude in the bounded vector, in (0, 1)."""

    def clip(self, l2_clip_norm: float) -> dpoptax.Clip:
        """Returns the geometry, whichever clip the config names."""
        return dpoptax.contrib.hyperspherical_clip(
            l2_clip_norm, angle_norm=self.angle_norm, magnitude_weight=self.magnitude_weight
        )


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
        """Returns this Adam, whichever optimizer the config names."""
        momentum = (1.0 - self.b1,), (-self.b1,)
        return dpoptax.extend.scale_by_lp_adam(*momentum, b2=self.b2, eps=self.eps, stddev=stddev)


@dataclasses.dataclass(frozen=True)
class SignSGD(Method):
    """The sign of each coordinate of the noisy gradient or its momentum (DP-SignSGD)."""

    name: ClassVar[str] = "DP-SignSGD"

    decay: float = field(0.0, Role.UNPRICED)
    """Decay of the momentum before the sign, in [0, 1)."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        """Returns momentum and sign, whichever optimizer the config names."""
        del stddev
        return optax.chain(optax.ema(self.decay), optax.scale_by_sign())


@dataclasses.dataclass(frozen=True)
class NormalizedSteps(Method):
    """Steps of one length, in the direction of the noisy gradient or its running mean."""

    name: ClassVar[str] = "Normalized steps"

    decay: float = field(0.0, Role.UNPRICED)
    """Decay of the running mean before the normalization, in [0, 1)."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        """Returns running mean and normalization, whichever optimizer the config names."""
        del stddev
        return optax.chain(optax.ema(self.decay), optax.normalize_by_update_norm())
