"""Methods of `dpoptax.contrib` for configs: nonlinear post-processing, and scales of gradients."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import optax
import optax.contrib

import dpoptax
from dpoptax.training.methods.method import Method
from dpoptax.training.roles import Role, field


@dataclasses.dataclass(frozen=True)
class SingularValues(Method):
    """Singular values of each kernel's gradient, shrunk by the noise (Gavish and Donoho, 2017)."""

    name: ClassVar[str] = "Singular values"

    decay: float = field(0.0, Role.UNPRICED)
    """Of the running mean that is shrunk, in [0, 1); 0 shrinks each release by itself."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """The shrinkage, told the noise."""
        return dpoptax.contrib.singular_value_shrinkage(stddev, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class JamesStein(Method):
    """Each layer's gradient, shrunk by the share of its power that is noise."""

    name: ClassVar[str] = "James-Stein"

    decay: float = field(0.0, Role.UNPRICED)
    """Of the running mean that is shrunk, in [0, 1); 0 shrinks each release by itself."""
    per_leaf: bool = True
    """Whether every array of parameters has a factor of its own."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """The shrinkage, told the noise."""
        return dpoptax.contrib.james_stein(stddev, decay=self.decay, per_leaf=self.per_leaf)


@dataclasses.dataclass(frozen=True)
class Muon(Method):
    """Momentum of kernels, orthogonalized; Adam for the other parameters (DP-Muon, 2026)."""

    name: ClassVar[str] = "Muon"

    decay: float = field(0.95, Role.UNPRICED)
    """Of the kernels' momentum, in [0, 1)."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        """Optax's Muon, whatever optimizer the config names."""
        del stddev
        # A learning rate of −1 takes back the sign: the trainer's own follows.
        return optax.contrib.muon(
            -1.0, beta=self.decay, muon_weight_dimension_numbers=_kernel_dimensions
        )


@dataclasses.dataclass(frozen=True)
class ShrunkMuon(Muon):
    """Muon that orthogonalizes what is above the noise; DP-AdamBC for the other parameters."""

    name: ClassVar[str] = "Shrunk Muon"

    def direction(self, stddev: float) -> optax.GradientTransformation:
        """The library's Muon, told the noise, whatever optimizer the config names."""
        return dpoptax.contrib.scale_by_shrunk_muon(stddev, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class SignSGD(Method):
    """The sign of the noisy gradient, or of its momentum, in every coordinate (DP-SignSGD)."""

    name: ClassVar[str] = "DP-SignSGD"

    decay: float = field(0.0, Role.UNPRICED)
    """Of the momentum whose sign is taken, in [0, 1)."""

    def direction(self, stddev: float) -> optax.GradientTransformation:
        """Momentum and sign, whatever optimizer the config names."""
        del stddev
        return optax.chain(optax.ema(self.decay), optax.scale_by_sign())


@dataclasses.dataclass(frozen=True)
class ScaleThenPrivatize(Method):
    """Gradients over the root of the second moment of earlier releases (Ganesh et al., 2025).

    Scales of the noise, and an optimizer that the config names behind it, such as Adam.
    """

    name: ClassVar[str] = "Scale then privatize"

    each: Literal["entry", "side", "leaf"] = "side"
    """What has a scale of its own: each entry, each row and column of a kernel, or each array."""
    b2: float = 0.99
    """Decay of the second moment, in [0, 1)."""
    eps: float = 0.1
    """Floor of the root of the second moment, relative to its size over all parameters."""
    power: float = 0.5
    """Of the second moment that gradients are divided by, in (0, 1]."""
    every: int = 1
    """Number of steps after which the scales change."""
    noise_corrected: bool = False
    """Whether the noise's known variance is taken off the second moment."""

    def filter(self, stddev: float) -> optax.GradientTransformation:
        """The scales, which releases pass through."""
        return dpoptax.contrib.scale_then_privatize(
            each=self.each,
            b2=self.b2,
            eps=self.eps,
            power=self.power,
            every=self.every,
            stddev=stddev if self.noise_corrected else 0.0,
        )


def _kernel_dimensions(params: Any) -> Any:
    """A kernel's last axis is its outputs; what has one axis or none is Adam's."""

    def dimensions(p: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if p.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(p.ndim - 1)), (p.ndim - 1,))

    return jax.tree.map(dimensions, params)
