"""Methods whose releases are DP-SGD's, with post-processing that is not linear behind them."""

import dataclasses
from typing import Any, ClassVar

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


def _kernel_dimensions(params: Any) -> Any:
    """A kernel's last axis is its outputs; what has one axis or none is Adam's."""

    def dimensions(p: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        if p.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(p.ndim - 1)), (p.ndim - 1,))

    return jax.tree.map(dimensions, params)
