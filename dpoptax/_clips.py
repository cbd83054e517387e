"""Clip geometries next to `l2_clip`: other curves from norm to factor, and a bound per layer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from dpoptax._clipping import Clip, positive

# Below this norm the factor C/‖g‖ grows no further, so that it stays a finite float32.
_TINY = 2.0**-90


@dataclasses.dataclass(frozen=True)
class AutomaticClip(Clip):
    """C/(‖g‖ + γ) g; see `automatic_clip`."""

    l2_clip_norm: float
    gamma: float

    @property
    def sensitivity(self) -> float:
        """C."""
        return self.l2_clip_norm

    def factors(self, norms):
        """C/(‖g‖ + γ)."""
        return self.l2_clip_norm / jnp.maximum(norms + self.gamma, _TINY)


def automatic_clip(l2_clip_norm: float, gamma: float = 0.01) -> AutomaticClip:
    """Normalises each example's gradient: g ↦ C g/(‖g‖ + γ), with no threshold to tune.

    AUTO-S for γ > 0, AUTO-V for γ = 0. C only scales the sum and its noise alike: with SGD it is
    part of the learning rate, with Adam it does nothing. γ keeps what AUTO-V loses: a gradient much
    shorter than γ stays proportionally short, and a zero gradient stays zero in both.

    Privacy: one example adds at most C to the sum, in l2 norm. An example with a non-finite
    gradient adds exactly zero.

    Args:
      l2_clip_norm: C.
      gamma: γ ≥ 0, in the units of the gradient of one example's loss.

    Raises:
      ValueError: a number outside its range.

    Source: Bu et al., "Automatic Clipping: Differentially Private Deep Learning Made Easier and
    Stronger", 2023.

    >>> automatic_clip(1.0).factors(jnp.array([0.99, 9.99]))
    Array([1. , 0.1], dtype=float32)
    """
    gamma = float(gamma)
    if not (math.isfinite(gamma) and gamma >= 0.0):
        raise ValueError(f"gamma={gamma}: want a finite number >= 0; 0 is AUTO-V")
    return AutomaticClip(positive("l2_clip_norm", l2_clip_norm), gamma)


@dataclasses.dataclass(frozen=True)
class PsacClip(Clip):
    """C/(‖g‖ + r/(‖g‖ + r)) g; see `psac_clip`."""

    l2_clip_norm: float
    r: float

    @property
    def sensitivity(self) -> float:
        """C."""
        return self.l2_clip_norm

    def factors(self, norms):
        """C/(‖g‖ + r/(‖g‖ + r))."""
        return self.l2_clip_norm / (norms + self.r / (norms + self.r))


def psac_clip(l2_clip_norm: float, r: float = 0.1) -> PsacClip:
    """Per-sample adaptive clipping: g ↦ C g/(‖g‖ + r/(‖g‖ + r)).

    Long gradients are normalised to C. Short ones are multiplied by about C, as the denominator
    tends to 1 where ‖g‖ tends to 0: unlike with `automatic_clip`, examples with vanishing gradients
    do not outweigh the others.

    Privacy: one example adds at most C to the sum, in l2 norm. An example with a non-finite
    gradient adds exactly zero.

    Args:
      l2_clip_norm: C.
      r: r > 0, in the units of the gradient's norm.

    Raises:
      ValueError: a number outside its range.

    Source: Xia et al., "Differentially Private Learning with Per-Sample Adaptive Clipping", 2023.

    >>> psac_clip(2.0).factors(jnp.array([0.0, 0.4]))
    Array([2.       , 3.3333...], dtype=float32)
    """
    return PsacClip(positive("l2_clip_norm", l2_clip_norm), positive("r", r))


@dataclasses.dataclass(frozen=True)
class NormalizedClip(Clip):
    """min(1/C, 1/‖g‖) g; see `normalized_clip`."""

    l2_clip_norm: float

    @property
    def sensitivity(self) -> float:
        """1."""
        return 1.0

    def factors(self, norms):
        """min(1/C, 1/‖g‖)."""
        return 1.0 / jnp.maximum(self.l2_clip_norm, norms)


def normalized_clip(l2_clip_norm: float) -> NormalizedClip:
    """Clips to C and divides by C: g ↦ min(1/C, 1/‖g‖) g.

    `l2_clip` in units of C: the noise and the learning rate no longer depend on C, so the two can
    be tuned one after the other.

    Privacy: one example adds at most 1 to the sum, in l2 norm. An example with a non-finite
    gradient adds exactly zero.

    Args:
      l2_clip_norm: C, in the units of the gradient of one example's loss.

    Raises:
      ValueError: `l2_clip_norm` is not a positive, finite number.

    Source: De et al., "Unlocking High-Accuracy Differentially Private Image Classification through
    Scale", 2022.

    >>> normalized_clip(5.0).sensitivity
    1.0
    """
    return NormalizedClip(positive("l2_clip_norm", l2_clip_norm))


@dataclasses.dataclass(frozen=True)
class PerLayerClip(Clip):
    """min(1, C_l/‖g_l‖) g_l for each layer l; see `per_layer_clip`."""

    l2_clip_norms: tuple[float, ...]
    layers: Any

    @property
    def sensitivity(self) -> float:
        """√Σ C_l²; with one bound split over all leaves, that bound."""
        return math.hypot(*self.l2_clip_norms)

    def groups(self, tree):
        """One group a layer: a subtree with a bound of its own, or every leaf."""
        if self.layers is None:
            return list(range(len(jax.tree.leaves(tree))))
        try:
            subtrees = self.layers.flatten_up_to(tree)
        except ValueError as error:
            raise ValueError(
                f"the layers of per_layer_clip are no prefix of the gradients: {error}"
            ) from error
        return [i for i, layer in enumerate(subtrees) for _ in jax.tree.leaves(layer)]

    def factors(self, norms):
        """min(1, C_l/‖g_l‖)."""
        bounds = jnp.asarray(self.l2_clip_norms, norms.dtype)
        if self.layers is None:
            bounds = bounds / math.sqrt(norms.shape[-1])
        return jnp.minimum(1.0, bounds / norms)


def per_layer_clip(l2_clip_norms: Any) -> PerLayerClip:
    """Clips each layer of each example's gradient by itself: g_l ↦ min(1, C_l/‖g_l‖) g_l.

    A layer whose gradients are long no longer shortens the others. Clipping and the sum of one
    layer need no other layer's norm.

    Privacy: one example adds at most √Σ C_l² to the sum, in l2 norm, and that is what the noise is
    scaled to, for every layer alike. An example with a non-finite gradient in any layer adds
    exactly zero to all.

    Args:
      l2_clip_norms: a tree that is a prefix of the parameters, with one bound C_l for each subtree,
        such as {"encoder": 1.0, "head": 0.1}; or a list of bounds where the parameters are a list;
        or one number C for the whole, which makes every leaf of m a layer with C_l = C/√m.

    Raises:
      ValueError: a bound that is no positive, finite number, or no bound; at the call, gradients
        that the tree is no prefix of.

    Source: McMahan et al., "Learning Differentially Private Recurrent Language Models", 2018.

    >>> per_layer_clip({"encoder": 3.0, "head": 4.0}).sensitivity
    5.0
    """
    bounds, layers = jax.tree.flatten(l2_clip_norms)
    if not bounds:
        raise ValueError(f"l2_clip_norms={l2_clip_norms!r}: want at least one bound")
    checked = tuple(positive("l2_clip_norms", bound) for bound in bounds)
    whole = jax.tree_util.treedef_is_leaf(layers)
    return PerLayerClip(checked, None if whole else layers)
