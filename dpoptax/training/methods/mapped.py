"""Methods that map gradients linearly before they are clipped, by what is public."""

import dataclasses
from typing import ClassVar, Literal

import optax

import dpoptax
from dpoptax.training.methods.method import Method


@dataclasses.dataclass(frozen=True)
class ScaleThenPrivatize(Method):
    """Gradients over the root of the second moment of earlier releases (Ganesh et al., 2025).

    Scales of the noise, and an optimizer that the config names behind it, such as Adam.
    """

    name: ClassVar[str] = "Scale then privatize"
    evenly_noised: ClassVar[bool] = False

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
