"""Defines clip geometries, which bound the sensitivity of a sum, and `l2_clip`."""

import abc
import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dpoptax._support.tree import PyTree

# Some libraries take a bound of 0 or infinity as a request for another geometry.
_REMEDIES = {
    0.0: "A bound of 0 cuts every gradient to zero. To scale all gradients to one length, the "
    "limit of a small clipping bound, write `dpoptax.automatic_clip(1.0, gamma=0.0)`.",
    math.inf: "Without a bound no noise makes the sum private. To find the bound privately, write "
    "`dpoptax.contrib.adaptive_clip(1.0)` with `dpoptax.contrib.adaptive_gaussian_noise`. To train "
    "without privacy, take the gradient of the mean loss, without clip and noise.",
}
# `bounds.MINIMUM_BOUND`, 2^-40, rounded up to a number that is easy to remember.
_SMALLEST_BOUND = 1e-12


class Encoding:
    """Holds the encoding of a clip; by default none, because most clips only scale gradients.

    It is apart from `Clip`, which declares only what users write. A clip that bounds another
    quantity than the gradient encodes gradients before they are scaled, and decodes the noisy mean.
    Only that of `adaptive_clip` has a `reference`, its threshold C_t.

    Attributes:
      encodes: whether the encoding differs from the identity.
      by_norms: whether the encoding scales by a function of the norm and adds one number, as
        `scaling`, `statistic` and `join` define. Otherwise `encode` defines it, which needs
        per-example gradients.
      own_stage: the name of the only noise stage for the clip, which keeps its reference; `None`
        for any stage.
    """

    encodes: ClassVar[bool] = False
    by_norms: ClassVar[bool] = False
    own_stage: ClassVar[str | None] = None

    @property
    def splits(self) -> bool:
        """Returns whether each layer has a bound that can be split over its parts; here not."""
        return False

    def encode(self, grads: PyTree, reference: PyTree) -> PyTree:
        """Encodes gradients, leaves (B, …), before they are scaled; here the identity.

        The result must not be finite for an example whose gradient is not finite. `reference` is
        public.
        """
        return grads

    def scaling(self, reference: PyTree) -> "Clip":
        """Returns the clip whose factors scale gradients to encode them; here itself."""
        assert isinstance(self, Clip)
        return self

    def statistic(self, norms: jax.Array, reference: PyTree) -> jax.Array | None:
        """Returns the number that the encoding adds to each gradient, (B,); here `None`.

        Statistics must be multiples of one number, up to 2⁸ times it, so that sums of 2¹⁶
        statistics are exact.
        """
        return None

    def join(self, gradient: PyTree, statistic: jax.Array | None) -> PyTree:
        """Joins scaled gradients and statistics, or their sums, to encodings or their sum."""
        return gradient

    def decode(self, mean: PyTree, reference: PyTree) -> PyTree:
        """Returns the gradient that the noisy mean encodes, shaped like the parameters."""
        return mean


class Clip(Encoding, abc.ABC):
    """Defines how a per-example gradient is bounded.

    A geometry assigns the gradient's leaves to groups, and scales each group by a factor computed
    from the groups' l2 norms. The scaled gradient has an l2 norm of at most `sensitivity`, for
    every input. Subclasses are frozen dataclasses.
    """

    @property
    @abc.abstractmethod
    def sensitivity(self) -> float:
        """Returns the largest l2 norm that one example can add to a `ClippedSum`."""

    @abc.abstractmethod
    def factors(self, norms: jax.Array) -> jax.Array:
        """Maps float32 upper bounds of norms, (…, groups), to factors of the same shape.

        For every t ≥ 0, t · factor(t) must be at most the group's bound. An example is scaled by
        the factor of an upper bound of its norm, so it also stays below the bound. If the factor is
        not finite, such as C/t at 0, the group adds zero.
        """

    def groups(self, tree: PyTree) -> list[int]:
        """Returns the group of each leaf, in the order of `jax.tree.leaves`; here 0."""
        return [0] * len(jax.tree.leaves(tree))


@dataclasses.dataclass(frozen=True)
class BoundedClip(Clip):
    """Base class for geometries that bound the whole gradient's norm by C.

    The sum scales with C.
    """

    l2_clip_norm: float

    @property
    def sensitivity(self) -> float:
        """Returns C, the clipping bound."""
        return self.l2_clip_norm


class UnitClip(Clip):
    """Base class of clips that encode each gradient with l2 norm at most 1."""

    encodes: ClassVar[bool] = True

    @property
    def sensitivity(self) -> float:
        """Returns 1, the bound of every encoded gradient."""
        return 1.0

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns min(1, 1/‖u‖), below 1 only if rounding made an encoding longer than 1."""
        return jnp.minimum(1.0, 1.0 / norms)


@dataclasses.dataclass(frozen=True)
class L2Clip(BoundedClip):
    """Scales to min(1, C/‖g‖) g; see `l2_clip`."""

    def factors(self, norms: jax.Array) -> jax.Array:
        """Returns min(1, C/‖g‖)."""
        return jnp.minimum(1.0, self.l2_clip_norm / norms)


def l2_clip(l2_clip_norm: float) -> L2Clip:
    """Clips each example's gradient to an l2 norm: g ↦ min(1, C/‖g‖) g.

    Privacy: one example adds at most C = `l2_clip_norm` to the sum, in l2 norm. An example adds
    exactly zero if its gradient is not finite or longer than 2³⁹ ≈ 5·10¹¹, or if the input of a
    layer is 2⁴⁰ ≈ 10¹² or more.

    Args:
      l2_clip_norm: C, in the units of the gradient of one example's loss, from 1e-12 to 1e9.

    Raises:
      ValueError: `l2_clip_norm` is outside of this range.

    Source: Abadi et al., "Deep Learning with Differential Privacy", 2016, Algorithm 1.

    >>> l2_clip(1.0).sensitivity
    1.0
    """
    return L2Clip(clip_norm("l2_clip_norm", l2_clip_norm))


def positive(name: str, value: float, remedies: Mapping[float, str] | None = None) -> float:
    """Returns `value` as a float, or raises an error if it is not positive.

    `remedies` continue the error for some values.
    """
    found = value if isinstance(value, numbers.Real) else _number(name, value)
    if not 0.0 < found <= 1e9:
        remedy = (remedies or {}).get(found)
        given = f"{value!r}." if remedy is None else f"{float(found)}. {remedy}"
        raise ValueError(f"`{name}` must be a number in (0, 1e9], got {given}")
    return float(found)


def clip_norm(name: str, value: float) -> float:
    """Returns a bound in the working range. The error for 0 or infinity suggests another geometry.

    docs/developers/bound.md derives the range.
    """
    found = positive(name, value, _REMEDIES)
    check_bound(f"`{name}`", found, _SMALLEST_BOUND)
    return found


def check_bound(name: str, bound: float, smallest: float) -> None:
    """Raises an error for a clipping bound below the working range."""
    if bound < smallest:
        raise ValueError(
            f"{name} must be at least {smallest:.2g}, got {bound:g}. Smaller numbers may be "
            "flushed to zero in float32. Scale the loss and the bound by the same factor."
        )


def _number(name: str, value: Any) -> float:
    """Returns `value` as a float; NaN if it is not a number, such as a string of one."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(
            f"`{name}` must be a Python number, got a traced array. It is part of the privacy "
            "statement, so fix it before `jax.jit`."
        )
    try:
        return math.nan if isinstance(value, str) else float(value)
    except TypeError:
        return math.nan


def as_clip(clip: Clip | float) -> Clip:
    """Returns `clip`, or `l2_clip(clip)` if it is a number, or raises an error otherwise."""
    if isinstance(clip, numbers.Real) and not isinstance(clip, bool):
        return L2Clip(clip_norm("clip", float(clip)))
    if not isinstance(clip, Clip):
        raise TypeError(
            f"`clip` must be a clip geometry, got {clip!r}. Pass for example "
            "`dpoptax.l2_clip(1.0)`."
        )
    return clip
