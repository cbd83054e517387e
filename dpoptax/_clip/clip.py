"""Clip geometries: what bounds the sensitivity of a sum, and the plainest of them."""

import abc
import dataclasses
import math
import numbers
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpoptax._tree import PyTree

# What a bound of 0 or infinity is written for, in libraries that take it for a geometry.
_MEANT = {
    0.0: "want a number in (0, 1e9]; at 0 every gradient is cut to nothing. To scale all gradients "
    "to one length, the limit of a small clip bound, write dpoptax.automatic_clip(1.0, gamma=0.0)",
    math.inf: "want a number in (0, 1e9]; without a bound no noise makes the sum private. To have "
    "the bound found, privately, write dpoptax.adaptive_clip(1.0) with "
    "dpoptax.adaptive_gaussian_noise; to train without privacy, take the gradient of the mean "
    "loss, without clip and noise",
}


class Clip(abc.ABC):
    """How a per-example gradient is bounded. Subclasses are frozen dataclasses: static, hashable.

    A geometry cuts the gradient's leaves into groups, and scales each group by a factor of its l2
    norms, so that the whole has l2 norm at most `sensitivity`, for every input. One that bounds
    something else than a scaled gradient encodes it first, and decodes the noisy mean.

    Attributes:
      encodes: whether `encode` is more than the identity.
      by_norms: whether each gradient's norm is all that `encode` needs, as `scaling`, `statistic`
        and `join` say; if not, and `encodes`, per-example gradients are needed.
      followed: whether the reference is kept by a noise stage of the geometry's own.
      selects: whether rows of a table were released for the sum, which that noise stage prices.
    """

    encodes: ClassVar[bool] = False
    by_norms: ClassVar[bool] = False
    followed: ClassVar[bool] = False
    selects: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """The largest l2 norm that one example can add to a `ClippedSum`."""

    @abc.abstractmethod
    def factors(self, norms: jax.Array) -> jax.Array:
        """Maps float32 upper bounds of norms, (…, groups), to factors of the same shape.

        For every t ≥ 0, t · factor(t) is at most the group's bound: an example is scaled by the
        factor of a number that its norm does not exceed, and so stays below the bound too. Where
        the factor is not finite, as C/t at 0, the group adds zero.
        """

    def groups(self, tree: PyTree) -> list[int]:
        """The group of each leaf of `tree`, in the order of `jax.tree.leaves`; one group here."""
        return [0] * len(jax.tree.leaves(tree))

    def encode(self, grads: PyTree, reference: PyTree) -> PyTree:
        """What is scaled and summed in place of the gradients, leaves (B, …); they themselves here.

        Not finite where an example's gradient is not. `reference` is public.
        """
        del reference
        return grads

    def scaling(self, reference: PyTree) -> "Clip":
        """The geometry whose factors `encode` scales gradients by, at a reference; itself here."""
        del reference
        return self

    def statistic(self, norms: jax.Array, reference: PyTree) -> jax.Array | None:
        """What `encode` puts beside each gradient, (B,), from its norm, (B,); nothing here.

        Whole multiples of one number, of at most 2⁸ times it: sums of up to 2¹⁶ are exact.
        """
        del norms, reference
        return None

    def join(self, gradient: PyTree, statistic: jax.Array | None) -> PyTree:
        """Sums of scaled gradients and of statistics as the sum that `encode` makes."""
        del statistic
        return gradient

    def decode(self, mean: PyTree, reference: PyTree) -> PyTree:
        """The gradient, shaped like the parameters, that the noisy mean encodes; itself here."""
        del reference
        return mean


class UnitClip(Clip):
    """Base of geometries that encode each gradient as a vector of l2 norm at most 1."""

    encodes: ClassVar[bool] = True

    @property
    def sensitivity(self) -> float:
        """1: the bound on what `encode` makes, whatever it is made of."""
        return 1.0

    def factors(self, norms: jax.Array) -> jax.Array:
        """Takes off what rounding put on top of 1."""
        return jnp.minimum(1.0, 1.0 / norms)


@dataclasses.dataclass(frozen=True)
class BoundedClip(Clip):
    """Base of geometries that bound the whole gradient's norm by a number C, and scale with it."""

    l2_clip_norm: float

    @property
    def sensitivity(self) -> float:
        """C, the clip bound."""
        return self.l2_clip_norm


@dataclasses.dataclass(frozen=True)
class L2Clip(BoundedClip):
    """min(1, C/‖g‖) g; see `l2_clip`."""

    def factors(self, norms: jax.Array) -> jax.Array:
        """min(1, C/‖g‖)."""
        return jnp.minimum(1.0, self.l2_clip_norm / norms)


def l2_clip(l2_clip_norm: float) -> L2Clip:
    """Clips each example's whole gradient to an l2 norm: g ↦ min(1, C/‖g‖) g.

    Privacy: one example adds at most C = `l2_clip_norm` to the sum, in l2 norm. An example with a
    non-finite gradient adds exactly zero.

    Args:
      l2_clip_norm: C, in the units of the gradient of one example's loss.

    Raises:
      ValueError: `l2_clip_norm` is not a positive, finite number.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1.

    >>> l2_clip(1.0).sensitivity
    1.0
    """
    return L2Clip(clip_norm("l2_clip_norm", l2_clip_norm))


def positive(name: str, value: float) -> float:
    """Returns `value` as a float, or raises with its name where it is no positive number."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"{name} is a traced array: it is part of the privacy claim, so it must be a Python "
            "number, fixed before jit"
        )
    found = _number(value)
    if not 0.0 < found <= 1e9:
        raise ValueError(f"{name}={value!r}: want a number in (0, 1e9]")
    return found


def clip_norm(name: str, value: float) -> float:
    """`positive`, which for a bound that bounds nothing names the geometry that is meant."""
    found = math.nan if isinstance(value, jax.core.Tracer) else _number(value)
    if found in _MEANT:
        raise ValueError(f"{name}={found}: {_MEANT[found]}")
    return positive(name, value)


def _number(value: Any) -> float:
    """`value` as a float; of what is no number, such as a text of one, NaN."""
    try:
        return math.nan if isinstance(value, str) else float(value)
    except TypeError:
        return math.nan


def as_clip(clip: Clip | float) -> Clip:
    """Returns `clip`, or `l2_clip(clip)` if it is a number."""
    if isinstance(clip, numbers.Real) and not isinstance(clip, bool):
        return L2Clip(clip_norm("clip", float(clip)))
    return check_clip(clip)


def check_clip(clip: object) -> Clip:
    """Returns `clip`, or raises where it is not a clip geometry."""
    if not isinstance(clip, Clip):
        raise TypeError(f"clip={clip!r}: want a clip geometry such as dpoptax.l2_clip(1.0)")
    return clip
